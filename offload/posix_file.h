#pragma once
/// The operating system's files. For offload/ only.

#include <algorithm>

#include "offload/file_system.h"

namespace tranche::detail {

/// The part of a range that can bypass the page cache: [begin, end), empty when begin == end.
struct DirectPart {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};
/// The whole aligned blocks of [offset, offset + bytes), if the memory of the first of them is aligned too.
DirectPart direct_part(const NativeFile& file, std::int64_t offset, const void* memory, std::int64_t bytes);

class PosixFile : public File {
 public:
  PosixFile(const std::string& path, OpenMode mode, Caching caching, const IoHook& hook);
  ~PosixFile() override;

  std::int64_t size() const override;
  void preallocate(std::int64_t bytes) override;
  void read(std::int64_t offset, void* memory, std::int64_t bytes) override;
  void write(std::int64_t offset, const void* memory, std::int64_t bytes) override;
  void truncate(std::int64_t bytes) override;
  void sync() override;
  bool direct() const override { return descriptors_.direct >= 0; }
  std::string direct_refusal() const override { return refusal_; }
  std::optional<NativeFile> native() const override;

 private:
  void open_direct(OpenMode mode);
  void require_regular(OpenMode mode) const;
  void transfer(IoCall call, std::int64_t offset, char* memory, std::int64_t bytes);
  /// Transfers [offset, offset + bytes) with one descriptor; returns the bytes done when a direct transfer
  /// ended at a place from which only the page cache can continue.
  std::int64_t transfer_by(int descriptor, IoCall call, std::int64_t offset, char* memory,
                           std::int64_t bytes);
  std::int64_t allowed(IoCall call, std::int64_t bytes) const {
    return hook_ ? std::min(hook_(call, bytes), bytes) : bytes;
  }

  IoHook hook_;
  NativeFile descriptors_;
  std::string refusal_;
};

}  // namespace tranche::detail
