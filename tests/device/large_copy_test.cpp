#include "device/large_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace tranche {
namespace {

/// Copies sizes near the thresholds between methods, from and to any address: all bytes change, and none
/// beside them.
TEST(LargeCopy, CopiesAllBytesAndNoOthers) {
  constexpr std::int64_t most = (std::int64_t{1} << 20) + 3 * 16'384 + 77;
  constexpr std::int64_t room = 64 + 4096;
  std::vector<unsigned char> source(static_cast<std::size_t>(most + room));
  std::uint32_t bits = 1;
  for (unsigned char& byte : source)
    byte = static_cast<unsigned char>((bits = bits * 1664525u + 1013904223u) >> 24);
  std::vector<unsigned char> target(source.size() + room);
  for (const std::int64_t bytes :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{4097}, (std::int64_t{1} << 20) - 1,
        std::int64_t{1} << 20, (std::int64_t{1} << 20) + 16'383, most}) {
    for (const int from : {0, 1, 48}) {
      for (const int to : {0, 1, 16, 63, 64}) {
        std::fill(target.begin(), target.end(), 0xcc);
        detail::copy_large(target.data() + to, source.data() + from, bytes);
        ASSERT_TRUE(std::equal(source.begin() + from, source.begin() + from + bytes, target.begin() + to))
            << bytes << " bytes from " << from << " to " << to;
        const auto touched = [](unsigned char byte) { return byte != 0xcc; };
        ASSERT_TRUE(std::none_of(target.begin(), target.begin() + to, touched));
        ASSERT_TRUE(std::none_of(target.begin() + to + bytes, target.begin() + to + bytes + 4096, touched));
      }
    }
  }
}

}  // namespace
}  // namespace tranche
