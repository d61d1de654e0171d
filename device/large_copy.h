#pragma once
/// Copies of host memory that bypass the caches.

#include <cstdint>

namespace tranche::detail {

/// memcpy for data that is not read soon. From 1 MiB on the stores bypass the caches, which saves reading the
/// target first and leaves the caches to other data. (The C library does so too, but only from a size that it
/// derives from the cache: some 100 MB on large servers, where copies of 16 MB take half as long again.)
void copy_large(void* to, const void* from, std::int64_t bytes);

/// The same for any size, for parts of a large copy.
void copy_past_caches(void* to, const void* from, std::int64_t bytes);

}  // namespace tranche::detail
