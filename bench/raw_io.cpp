#include "bench/raw_io.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tranche/core/error.h"
#if TRANCHE_HAS_URING
#include <liburing.h>
#endif

namespace tranche::bench {
namespace {

void check(std::int64_t result, const char* what) {
  if (result < 0) throw Error(fmt::format("{} failed: {}", what, std::strerror(static_cast<int>(-result))));
}

std::int64_t block_at(const RawTransfer& transfer, std::int64_t offset) {
  return std::min(transfer.block, transfer.bytes - offset);
}

}  // namespace

void transfer_blocking(const RawTransfer& transfer) {
  for (std::int64_t offset = 0; offset < transfer.bytes; offset += transfer.block) {
    const auto count = static_cast<std::size_t>(block_at(transfer, offset));
    char* memory = transfer.memory + offset;
    const auto done = transfer.writing ? ::pwrite(transfer.descriptor, memory, count, offset)
                                       : ::pread(transfer.descriptor, memory, count, offset);
    if (done != static_cast<ssize_t>(count)) check(done < 0 ? -errno : -EIO, "a raw transfer");
  }
}

#if TRANCHE_HAS_URING

struct RawRing::Impl {
  io_uring ring{};
  int depth = 0;
  bool registered = false;
};

RawRing::RawRing(int depth, char* memory,  // NOLINT(readability-non-const-parameter): the system writes to it
                 std::int64_t bytes)
    : impl_(std::make_unique<Impl>()) {
  impl_->depth = depth;
  check(io_uring_queue_init(static_cast<unsigned>(depth), &impl_->ring, 0), "io_uring");
  const iovec range{memory, static_cast<std::size_t>(bytes)};
  impl_->registered = io_uring_register_buffers(&impl_->ring, &range, 1) == 0;  // at most 1 GiB
}

RawRing::~RawRing() {
  io_uring_queue_exit(&impl_->ring);
}

void RawRing::transfer(const RawTransfer& transfer) {
  io_uring* ring = &impl_->ring;
  std::int64_t next = 0;
  std::int64_t done = 0;
  const auto submit = [&] {
    io_uring_sqe* entry = io_uring_get_sqe(ring);
    const auto count = static_cast<unsigned>(block_at(transfer, next));
    const auto offset = static_cast<std::uint64_t>(next);
    char* memory = transfer.memory + next;
    if (impl_->registered && transfer.writing) {
      io_uring_prep_write_fixed(entry, transfer.descriptor, memory, count, offset, 0);
    } else if (impl_->registered) {
      io_uring_prep_read_fixed(entry, transfer.descriptor, memory, count, offset, 0);
    } else if (transfer.writing) {
      io_uring_prep_write(entry, transfer.descriptor, memory, count, offset);
    } else {
      io_uring_prep_read(entry, transfer.descriptor, memory, count, offset);
    }
    io_uring_sqe_set_data64(entry, count);
    next += count;
  };
  for (int i = 0; i < impl_->depth && next < transfer.bytes; ++i) submit();
  while (done < transfer.bytes) {
    check(io_uring_submit_and_wait(ring, 1), "io_uring_submit_and_wait");
    io_uring_cqe* completion = nullptr;
    while (io_uring_peek_cqe(ring, &completion) == 0) {
      const auto expected = static_cast<std::int64_t>(io_uring_cqe_get_data64(completion));
      if (completion->res != expected) check(completion->res < 0 ? completion->res : -EIO, "io_uring");
      io_uring_cqe_seen(ring, completion);
      done += expected;
      if (next < transfer.bytes) submit();
    }
  }
}

#else

struct RawRing::Impl {};
RawRing::RawRing(int, char*, std::int64_t) {
  throw NotCompiled("io_uring", "TRANCHE_URING");
}
RawRing::~RawRing() = default;
void RawRing::transfer(const RawTransfer&) {}

#endif

}  // namespace tranche::bench
