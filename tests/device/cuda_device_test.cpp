#include <cmath>
#include <thread>

#include "tests/device/cuda_support.h"
#include "tranche/device/cuda_interop.h"

namespace tranche {
namespace {

using ::testing::HasSubstr;
using testing_support::message_of;

class CudaDevice : public testing_support::CudaTest {};

TEST_F(CudaDevice, SaysWhatItIs) {
  const detail::CudaDeviceInfo info = detail::probe_cuda().devices[0];
  EXPECT_EQ(device().kind(), DeviceKind::cuda);
  EXPECT_EQ(device().index(), 0);
  EXPECT_FALSE(device().host_accessible());
  EXPECT_EQ(device().description(), info.name + " (compute capability " + std::to_string(info.compute_major) +
                                        "." + std::to_string(info.compute_minor) + ", " +
                                        std::to_string(info.multiprocessors) + " multiprocessors)");
  EXPECT_EQ(cuda_ordinal(device()), 0);
  EXPECT_EQ(compute().kind(), DeviceKind::cuda);
  EXPECT_EQ(compute().name(), "compute");
  EXPECT_EQ(compute().threads(), 1);
  EXPECT_NE(compute().native_handle(), nullptr);
  EXPECT_THAT(message_of<InvalidArgument>([&] { device().memory(Tier::nvme); }), HasSubstr("nvme"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { device().create_inline_stream("odd", 0); }),
              HasSubstr("'odd'"));
}

TEST_F(CudaDevice, RanksBeyondTheGpusShareThem) {
  const int gpus = static_cast<int>(detail::probe_cuda().devices.size());
  const auto second = make_device({DeviceKind::cuda, gpus, 1});
  EXPECT_EQ(cuda_ordinal(*second), 0);
  EXPECT_EQ(second->index(), gpus);
  EXPECT_THAT(second->description(), HasSubstr("shared: rank " + std::to_string(gpus) +
                                               " of this node has GPU 0 of " + std::to_string(gpus)));
  // Two devices have separate memory and streams, and one waits for events of the other.
  Buffer a = memory(1000);
  Buffer b(second->memory(Tier::device), 1000, Category::other, "second");
  const auto data = bytes(1000);
  device().copy_from_host(compute(), a.data(), data.data(), 1000);
  second->compute_stream().wait(compute().record());
  EXPECT_EQ(read(a.data(), 1000, second->compute_stream()).size(), 1000u);
}

TEST_F(CudaDevice, EveryThreadFindsItsDevice) {
  Buffer a = memory(4096);
  std::vector<unsigned char> seen;
  std::thread other([&] {
    auto stream = device().create_inline_stream("other", 1);
    device().fill_bytes(*stream, a.data(), 7, 4096);
    seen = read(a.data(), 4096, *stream);
  });
  other.join();
  EXPECT_EQ(seen, std::vector<unsigned char>(4096, 7));
}

TEST_F(CudaDevice, MemoryInfoAddsUp) {
  const MemoryInfo before = device().memory_info();
  EXPECT_GT(before.total, 0);
  EXPECT_GT(before.free, 0);
  EXPECT_LE(before.free + before.mapped, before.total);
  EXPECT_EQ(before.placed, 0);
  {
    Buffer a = memory(5 << 20);
    Buffer host = memory(3 << 20, Tier::host);
    const MemoryInfo held = device().memory_info();
    EXPECT_EQ(held.placed, 5 << 20);
    EXPECT_GE(held.mapped, held.placed);
    EXPECT_LT(held.mapped - held.placed, 2 << 20) << "less than one page of rounding";
    EXPECT_LE(held.free + held.mapped, held.total);
    EXPECT_GE(held.pinned, 3 << 20);
    EXPECT_EQ(held.staging, 0) << "nothing was copied yet";
  }
  const MemoryInfo after = device().memory_info();
  EXPECT_EQ(after.placed, 0);
  EXPECT_EQ(after.total, before.total);
  device().release_unused();
  EXPECT_EQ(device().memory_info().mapped, 0);
}

// The memory that the driver reports as used is what the resource reports as mapped. Other processes may use
// the GPU too, so that several attempts may be needed; otherwise the first succeeds.
TEST_F(CudaDevice, TheDriverAgreesAboutWhatIsMapped) {
  constexpr std::int64_t bytes = 64 << 20;
  std::int64_t difference = -1;
  for (int attempt = 0; attempt < 5 && difference != 0; ++attempt) {
    const MemoryInfo before = device().memory_info();
    Buffer a = memory(bytes);
    const MemoryInfo after = device().memory_info();
    difference = (before.free - after.free) - (after.mapped - before.mapped);
    a.reset();
    device().release_unused();
  }
  EXPECT_EQ(difference, 0);
}

TEST_F(CudaDevice, WhatIsNotOfThisDeviceIsRefused) {
  auto cpu = make_device({DeviceKind::cpu, 0, 1});
  Buffer a = memory(16);
  char host[16] = {};
  EXPECT_THAT(
      message_of<InvalidArgument>([&] { device().copy_to_host(cpu->compute_stream(), host, a.data(), 16); }),
      HasSubstr("copy to host on stream 'compute' of kind cpu"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { device().copy_to_host(compute(), host, a.data(), -1); }),
              HasSubstr("-1 bytes"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { device().copy_from_host(compute(), a.data(), host, -2); }),
              HasSubstr("-2 bytes"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { device().fill_bytes(compute(), a.data(), 0, -3); }),
              HasSubstr("-3 bytes"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { wrap_stream(*cpu, nullptr, "mine"); }),
              HasSubstr("no cuda device"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { cuda_ordinal(*cpu); }), HasSubstr("no cuda device"));
}

TEST_F(CudaDevice, AForeignStreamIsOneOrderWithItsWrapper) {
  auto owner = device().create_stream("owner");
  auto wrapped = wrap_stream(device(), owner->native_handle(), "wrapped");
  EXPECT_EQ(wrapped->name(), "wrapped");
  EXPECT_EQ(wrapped->native_handle(), owner->native_handle());
  Buffer a = memory(100);
  device().fill_bytes(*owner, a.data(), 1, 100);
  device().fill_bytes(*wrapped, a.data(), 2, 100);
  device().fill_bytes(*owner, a.data(), 3, 50);
  std::vector<unsigned char> expected(100, 2);
  std::fill(expected.begin(), expected.begin() + 50, 3);
  EXPECT_EQ(read(a.data(), 100, *wrapped), expected);
  wrapped.reset();
  device().fill_bytes(*owner, a.data(), 4, 100);
  EXPECT_EQ(read(a.data(), 100, *owner), std::vector<unsigned char>(100, 4)) << "the stream is its owner's";
}

TEST_F(CudaDevice, EventsOutliveTheirStream) {
  Event event;
  {
    auto stream = device().create_stream("brief");
    event = stream->record();
  }
  event.wait();
  EXPECT_TRUE(event.query());
  EXPECT_FALSE(std::isnan(event.passed_at()));
}

}  // namespace
}  // namespace tranche
