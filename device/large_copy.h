#pragma once
/// Copies of host memory that go past the caches.

#include <cstdint>

namespace tranche::detail {

/// memcpy for what nobody reads soon: from 1 MiB on the bytes go past the caches, which saves reading the
/// target first and leaves the caches to others. (The C library does so too, but only from a size that it
/// derives from the cache: some 100 MB on large servers, where pieces of 16 MB take half as long again.)
void copy_large(void* to, const void* from, std::int64_t bytes);

/// The same whatever the size, for pieces of something large.
void copy_past_caches(void* to, const void* from, std::int64_t bytes);

}  // namespace tranche::detail
