#pragma once
/// How often tests repeat what they repeat, and which part of it one run takes.
///
/// TRANCHE_TEST_PART="k/n" (0 <= k < n) says that a run takes part k of n of what is drawn and swept: n
/// successive runs with k = 0, 1, ..., n - 1 meet together what one run without the variable meets. The
/// numbers of rounds and points, and with them all seeds, are the same in both. scripts/test.sh sets the
/// variable, and leaves it unset with --full. A program that left something out says so in its last lines.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <string_view>
#include <system_error>
#include <vector>

namespace tranche::test {

/// True when this build runs under AddressSanitizer or ThreadSanitizer, where everything takes some twenty
/// times as long.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif

/// Part `part` of `of`.
struct SweepPart {
  int part = 0, of = 1;
};

/// The part that `text` names ("k/n"; null and empty text name all). Ends the process with status 2 at any
/// other text, since a run whose part nobody knows tests nobody knows what.
inline SweepPart read_sweep_part(const char* text) {
  const std::string_view all = text == nullptr ? "" : text;
  if (all.empty()) return {};
  SweepPart read;
  const char* const end = all.data() + all.size();
  const auto part = std::from_chars(all.data(), end, read.part);
  if (part.ec == std::errc() && part.ptr != end && *part.ptr == '/') {
    const auto of = std::from_chars(part.ptr + 1, end, read.of);
    if (of.ec == std::errc() && of.ptr == end && read.part >= 0 && read.part < read.of) return read;
  }
  std::fprintf(
      stderr,
      "TRANCHE_TEST_PART is \"%s\": it has to be k/n with 0 <= k < n, such as 1/3, or unset for all\n", text);
  std::exit(2);
}

/// The part that this process takes.
inline SweepPart sweep_part() {
  static const SweepPart part = read_sweep_part(std::getenv("TRANCHE_TEST_PART"));
  return part;
}

/// Rounds, points and values that this process met, and those that it took.
struct SweepCount {
  std::atomic<long> met{0}, taken{0};
  /// Returns `take`.
  bool count(bool take) {
    ++met;
    taken += take;
    return take;
  }
};
inline SweepCount sweep_count;

/// Prints at the end of a program what it left out. An environment of GoogleTest, because the result printer
/// says nothing with --gtest_brief=1, and a list of the tests has to stay one.
class SweepReport : public ::testing::Environment {
 public:
  SweepReport() { (void)sweep_part(); }  // a text that is no part ends the program at its start
  void TearDown() override {
    const long met = sweep_count.met, taken = sweep_count.taken;
    if (met == taken) return;
    const SweepPart part = sweep_part();
    std::printf("sweeps: part %d/%d (TRANCHE_TEST_PART)%s; %ld of %ld rounds\n", part.part, part.of,
                sanitized ? ", sanitized" : "", taken, met);
    std::fflush(stdout);
  }
};
inline ::testing::Environment* const sweep_report = ::testing::AddGlobalTestEnvironment(new SweepReport);

/// True for the numbers of part k of n. The two lowest digits to the base n are mixed, so that a part has
/// every remainder by n: a loop of n values in a sweep, or a round that looks at its number modulo n, meets
/// each of them in each part.
constexpr bool lies_in(SweepPart part, int number) {
  return (number + number / part.of) % part.of == part.part;
}

/// The rounds of 0 ... full - 1 that this run takes: every one; one in n with TRANCHE_TEST_PART; a quarter
/// where sanitized, another one in each part, since a sanitizer looks for a kind of access, which few rounds
/// show as well as many. One at least. A round draws from its number alone, so that it has the same seed
/// whatever ran before it.
inline std::vector<int> rounds(int full) {
  const SweepPart part = sweep_part();
  const int quarter = (full + 3) / 4;
  std::vector<int> taken;
  for (int round = 0; round < full; ++round) {
    const bool take = sanitized ? round / quarter == part.part % 4 : lies_in(part, round);
    if (sweep_count.count(take)) taken.push_back(round);
  }
  if (taken.empty() && full > 0) taken.push_back(part.part % full);
  return taken;
}

/// `full`, and a quarter of it (at least one) where sanitized: sizes and numbers of steps, of which no run
/// takes a part.
template <class Number>
constexpr Number fewer(Number full) {
  return sanitized ? (full + 3) / 4 : full;
}

/// True when this run takes point number `point` of a sweep: every one; one in n with TRANCHE_TEST_PART; one
/// in `stride` where sanitized. With a stride that has no factor in common with the lengths of the sweep's
/// loops, every value of each loop is still met; a part meets them where the sweep has some more points than
/// n times its longest loop. A point that draws does it before it asks, or from its number alone.
inline bool swept(int point, int stride = 1) {
  const SweepPart part = sweep_part();
  return sweep_count.count(sanitized ? point % stride == part.part % stride : lies_in(part, point));
}

/// The values of an instantiated suite: `all`, or `few` of them where sanitized. Of more than four values a
/// part takes `few` and one in n of the others, in their order.
template <class T>
std::vector<T> swept_values(std::initializer_list<T> all, std::initializer_list<T> few) {
  const SweepPart part = sweep_part();
  std::vector<T> taken;
  int turn = 0;
  for (const T& value : all) {
    const bool always = std::find(few.begin(), few.end(), value) != few.end();
    const bool take = always || (!sanitized && (all.size() <= 4 || lies_in(part, turn)));
    turn += !always;
    if (sweep_count.count(take)) taken.push_back(value);
  }
  return taken;
}

}  // namespace tranche::test
