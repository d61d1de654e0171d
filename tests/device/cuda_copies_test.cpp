#include "tests/device/cuda_support.h"

namespace tranche {
namespace {

using ::testing::HasSubstr;

class CudaCopies : public testing_support::CudaTest {};

constexpr std::int64_t mebibyte = std::int64_t{1} << 20;

// Sizes near the limits of the ring (64 KiB per copy, 128 KiB per segment) and of the chunks (4 MiB).
const std::vector<std::int64_t> odd_sizes{0,
                                          1,
                                          3,
                                          255,
                                          256,
                                          257,
                                          4096,
                                          65535,
                                          65536,
                                          65537,
                                          99991,
                                          131072,
                                          262147,
                                          4 * mebibyte,
                                          4 * mebibyte + 1,
                                          9 * mebibyte + 7};

TEST_F(CudaCopies, PageableRoundTrips) {
  for (const std::int64_t size : odd_sizes) {
    SCOPED_TRACE(size);
    Buffer a = memory(size + 512);
    device().fill_bytes(compute(), a.data(), 0xee, size + 512);
    auto data = bytes(size, 1);
    auto* middle = static_cast<unsigned char*>(a.data()) + 256;
    device().copy_from_host(compute(), middle, data.data(), size);
    const auto sent = data;
    std::fill(data.begin(), data.end(), 0x55);  // may be used again at once
    const auto all = read(a.data(), size + 512);
    EXPECT_TRUE(std::equal(sent.begin(), sent.end(), all.begin() + 256));
    for (std::int64_t i = 0; i < 256; ++i) {
      ASSERT_EQ(all[static_cast<std::size_t>(i)], 0xee);
      ASSERT_EQ(all[static_cast<std::size_t>(size + 256 + i)], 0xee);
    }
  }
}

TEST_F(CudaCopies, PinnedRoundTripsInStreamOrder) {
  for (const std::int64_t size : odd_sizes) {
    SCOPED_TRACE(size);
    Buffer a = memory(size);
    Buffer host = memory(size, Tier::host);
    const auto data = bytes(size, 2);
    std::copy(data.begin(), data.end(), static_cast<unsigned char*>(host.data()));
    device().copy_from_host(compute(), a.data(), host.data(), size);
    device().fill_bytes(compute(), a.data(), 9, size / 2);
    const std::int64_t waits = device().counters().host_waits;
    device().copy_to_host(compute(), host.data(), a.data(), size);
    EXPECT_EQ(device().counters().host_waits, waits) << "pinned memory is copied behind the host";
    compute().record().wait();  // an event is enough for pinned memory
    auto expected = data;
    std::fill(expected.begin(), expected.begin() + static_cast<std::ptrdiff_t>(size / 2), 9);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), static_cast<unsigned char*>(host.data())));
  }
}

TEST_F(CudaCopies, SmallOnesDoNotStopTheHost) {
  Buffer a = memory(1024);
  const auto data = bytes(1024, 3);
  std::vector<unsigned char> back(1024, 0xcd);
  device().copy_from_host(compute(), a.data(), data.data(), 1024);  // allocates the staging memory
  compute().synchronize();
  auto gate = std::make_shared<HostEvent>();
  const std::int64_t waits = device().counters().host_waits;
  compute().wait(Event(gate));
  for (int i = 0; i < 4; ++i)
    device().copy_to_host(compute(), back.data() + 256 * i, static_cast<char*>(a.data()) + 256 * i, 256);
  device().copy_from_host(compute(), a.data(), data.data() + 512, 256);
  EXPECT_EQ(device().counters().host_waits, waits);
  EXPECT_EQ(back, std::vector<unsigned char>(1024, 0xcd)) << "the stream has not come this far";
  gate->complete();
  compute().synchronize();
  EXPECT_EQ(device().counters().host_waits, waits + 1) << "synchronize is the one wait";
  EXPECT_EQ(back, data);
  EXPECT_EQ(read(a.data(), 256), std::vector<unsigned char>(data.begin() + 512, data.begin() + 768));
}

// Copies of a batch's tokens and targets do not block the host while the GPU is busy.
TEST_F(CudaCopies, TwoLargePageableOnesToABusyDeviceDoNotStopTheHost) {
  Buffer a = memory(6 * mebibyte);
  const auto data = bytes(6 * mebibyte, 11);
  std::vector<unsigned char> back(data.size());
  const auto gate = std::make_shared<HostEvent>();
  compute().wait(Event(gate));
  const std::int64_t waits = device().counters().host_waits;
  for (const std::int64_t begin : {std::int64_t{0}, 3 * mebibyte}) {
    device().copy_from_host(compute(), static_cast<char*>(a.data()) + begin, data.data() + begin,
                            3 * mebibyte);
  }
  EXPECT_EQ(device().counters().host_waits, waits);
  gate->complete();
  device().copy_to_host(compute(), back.data(), a.data(), 6 * mebibyte);
  compute().synchronize();
  EXPECT_EQ(back, data);
}

TEST_F(CudaCopies, LargePageableOnesToTheHostStopItAndSaySo) {
  Buffer a = memory(5 * mebibyte);
  const auto data = bytes(5 * mebibyte, 4);
  std::vector<unsigned char> back(data.size());
  const std::int64_t waits = device().counters().host_waits;
  device().copy_from_host(compute(), a.data(), data.data(), 5 * mebibyte);
  const std::int64_t sent = device().counters().host_waits;
  EXPECT_LE(sent, waits + 1) << "at most for the end of the chunk two before";
  device().copy_to_host(compute(), back.data(), a.data(), 5 * mebibyte);
  EXPECT_EQ(device().counters().host_waits, sent + 1);
  compute().synchronize();
  EXPECT_EQ(back, data);
}

// The ring wraps around many times between two synchronizes, with reads and writes of odd sizes.
TEST_F(CudaCopies, MoreSmallOnesThanTheRingHolds) {
  constexpr std::int64_t size = 40009;
  constexpr int count = 120;  // 4.6 MiB through a ring of 1 MiB
  Buffer a = memory(size * count);
  const auto data = bytes(size * count, 5);
  std::vector<unsigned char> back(data.size());
  for (int i = 0; i < count; ++i) {
    device().copy_from_host(compute(), static_cast<char*>(a.data()) + i * size, data.data() + i * size, size);
    if (i % 3 != 0) continue;
    device().copy_to_host(compute(), back.data() + i * size, static_cast<char*>(a.data()) + i * size, size);
  }
  for (int i = 0; i < count; ++i) {
    if (i % 3 == 0) continue;
    device().copy_to_host(compute(), back.data() + i * size, static_cast<char*>(a.data()) + i * size, size);
  }
  compute().synchronize();
  EXPECT_EQ(back, data);
  const MemoryInfo info = device().memory_info();
  EXPECT_EQ(info.staging, mebibyte) << "the ring, whatever went through it";
}

// Several copies into the same memory take different paths; the last one counts.
TEST_F(CudaCopies, ArriveInOrder) {
  Buffer a = memory(mebibyte);
  std::vector<unsigned char> back(mebibyte, 0);
  device().fill_bytes(compute(), a.data(), 1, mebibyte);
  device().copy_to_host(compute(), back.data(), a.data(), 100);
  device().fill_bytes(compute(), a.data(), 2, mebibyte);
  device().copy_to_host(compute(), back.data(), a.data(), 50);
  compute().synchronize();
  EXPECT_EQ(back[49], 2);
  EXPECT_EQ(back[50], 1);
  device().copy_to_host(compute(), back.data(), a.data(), 100);
  device().fill_bytes(compute(), a.data(), 3, mebibyte);
  device().copy_to_host(compute(), back.data(), a.data(), mebibyte);  // a large copy after a small one
  compute().synchronize();
  EXPECT_EQ(back, std::vector<unsigned char>(mebibyte, 3));
}

TEST_F(CudaCopies, FillsAreExact) {
  for (const std::int64_t size : odd_sizes) {
    if (size > mebibyte) continue;
    Buffer a = memory(size + 256);
    device().fill_bytes(compute(), a.data(), 1, size + 256);
    device().fill_bytes(compute(), a.data(), 0xff, size);
    const auto all = read(a.data(), size + 256);
    for (std::size_t i = 0; i < all.size(); ++i)
      ASSERT_EQ(all[i], static_cast<std::int64_t>(i) < size ? 0xff : 1);
  }
}

TEST_F(CudaCopies, PinnedMemoryIsNotOverrun) {
  Buffer host = memory(2 * mebibyte, Tier::host);
  Buffer a = memory(3 * mebibyte);
  EXPECT_THAT(testing_support::message_of<InvalidArgument>(
                  [&] { device().copy_to_host(compute(), host.data(), a.data(), 3 * mebibyte); }),
              HasSubstr("runs over its end"));
  compute().synchronize();
}

}  // namespace
}  // namespace tranche
