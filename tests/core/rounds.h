#pragma once
/// The number of repetitions in tests, and the part of them that one run performs.
///
/// TRANCHE_TEST_PART="k/n" (0 <= k < n) selects part k of n of everything that is drawn and swept. The runs
/// with k = 0, 1, ..., n - 1 together perform what one run without the variable performs, with the same
/// numbers of rounds and points and the same seeds. scripts/test.sh sets the variable, except with --full. A
/// program that left something out reports it in its last lines.

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

/// True if this build runs under AddressSanitizer or ThreadSanitizer, where everything takes some twenty
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

/// Parses "k/n"; null and an empty text select everything. Any other text ends the process with status 2,
/// because it would be unknown what such a run tested.
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

/// The part that this process runs.
inline SweepPart sweep_part() {
  static const SweepPart part = read_sweep_part(std::getenv("TRANCHE_TEST_PART"));
  return part;
}

/// The numbers of rounds, points and values that this process reached, and that it ran.
struct SweepCount {
  std::atomic<long> met{0}, taken{0};
  /// Counts one; returns `take`.
  bool count(bool take) {
    ++met;
    taken += take;
    return take;
  }
};
inline SweepCount sweep_count;

/// Prints at the end of a program what it left out. It is a GoogleTest environment, because the result
/// printer prints nothing with --gtest_brief=1, and the list of tests must not change.
class SweepReport : public ::testing::Environment {
 public:
  SweepReport() { (void)sweep_part(); }  // an invalid text ends the program at its start
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

/// True for the numbers that belong to the part. The two lowest digits to the base n are mixed, so that each
/// part has every remainder modulo n. So a loop of n values in a sweep, or a round that uses its number
/// modulo n, has all its values in each part.
constexpr bool lies_in(SweepPart part, int number) {
  return (number + number / part.of) % part.of == part.part;
}

/// The rounds of 0 ... full - 1 that this run performs, at least one: all of them, one in n with
/// TRANCHE_TEST_PART, and a sixth where sanitized (a different one in each part), because a sanitizer looks
/// for kinds of accesses, which a few rounds show as well. A round draws from its number alone, so its seed
/// does not depend on earlier rounds.
inline std::vector<int> rounds(int full) {
  const SweepPart part = sweep_part();
  const int sixth = (full + 5) / 6;
  std::vector<int> taken;
  for (int round = 0; round < full; ++round) {
    const bool take = sanitized ? round / sixth == part.part % 6 : lies_in(part, round);
    if (sweep_count.count(take)) taken.push_back(round);
  }
  if (taken.empty() && full > 0) taken.push_back(part.part % full);
  return taken;
}

/// `full`; where sanitized a quarter of it, at least one. For sizes and numbers of steps, which are not
/// divided into parts.
template <class Number>
constexpr Number fewer(Number full) {
  return sanitized ? (full + 3) / 4 : full;
}

/// True if this run performs point number `point` of a sweep: all of them, one in n with TRANCHE_TEST_PART,
/// and one in `stride` where sanitized. If the stride has no common factor with the lengths of the sweep's
/// loops, every value of each loop still occurs. A part contains them if the sweep has somewhat more points
/// than n times its longest loop. A point must draw its numbers before this call, or from its number alone.
inline bool swept(int point, int stride = 1) {
  const SweepPart part = sweep_part();
  return sweep_count.count(sanitized ? point % stride == part.part % stride : lies_in(part, point));
}

/// Like swept() where sanitized. All other runs perform every point, also with TRANCHE_TEST_PART.
inline bool sampled(int point, int stride) {
  return !sanitized || swept(point, stride);
}

/// The values of an instantiated suite: `all`, or `few` of them where sanitized. If there are more than four
/// values, a part has `few` and one in n of the others, in their order.
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
