#include "tools/transfer_progress.h"

#include <gmock/gmock.h>

namespace tranche::tools {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

constexpr std::int64_t mebibyte = 1 << 20;

TEST(TransferProgress, RedrawsALineInATerminal) {
  double now = 100;
  std::string text;
  {
    TransferProgress progress(
        "verified", 400 * mebibyte, true, [&](std::string_view part) { text += part; }, [&] { return now; });
    now += 0.1;
    progress.add(50 * mebibyte);
    EXPECT_EQ(text, "") << "too early to redraw";
    now += 0.9;
    progress.add(50 * mebibyte);
    EXPECT_EQ(text, "\rverified 100.00 MiB of 400.00 MiB, 100.00 MiB/s, 3 s left");
    text.clear();
    now += 1;
    progress.add(300 * mebibyte);
    EXPECT_THAT(text, StartsWith("\rverified 400.00 MiB of 400.00 MiB, 200.00 MiB/s  "));
    EXPECT_EQ(progress.summary(), "400.00 MiB in 2.0 s, 200.00 MiB/s");
    text.clear();
  }
  const std::size_t last = std::string("verified 400.00 MiB of 400.00 MiB, 200.00 MiB/s").size();
  EXPECT_EQ(text, "\r" + std::string(last, ' ') + "\r");
}

TEST(TransferProgress, WritesFewLinesElsewhere) {
  double now = 0;
  std::string text;
  {
    TransferProgress progress(
        "exported", 1000 * mebibyte, false, [&](std::string_view part) { text += part; },
        [&] { return now; });
    for (int i = 0; i < 50; ++i) {
      now += 1;
      progress.add(10 * mebibyte);
    }
  }
  EXPECT_EQ(text, "exported 300.00 MiB of 1000.00 MiB, 10.00 MiB/s, 1 min 10 s left\n");
}

TEST(TransferProgress, NothingAtAll) {
  std::string text;
  {
    TransferProgress progress(
        "verified", 0, true, [&](std::string_view part) { text += part; }, [] { return 1.0; });
    EXPECT_THAT(progress.summary(), HasSubstr("in 0.0 s"));
  }
  EXPECT_EQ(text, "");
}

}  // namespace
}  // namespace tranche::tools
