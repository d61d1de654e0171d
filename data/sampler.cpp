#include "tranche/data/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <span>

#include "tranche/core/error.h"
#include "tranche/core/random.h"
#include "tranche/kernels/cross_entropy.h"

namespace tranche::data {

namespace {
/// Three rounds already pass statistical tests of order; a fourth costs nothing here.
constexpr std::uint64_t rounds = 4;
}  // namespace

Permutation::Permutation(std::int64_t size, std::uint64_t seed, std::uint64_t epoch)
    : size_(size), seed_(seed), epoch_(epoch) {
  if (size < 1 || size > (std::int64_t{1} << 56)) {
    throw InvalidArgument(fmt::format("a permutation of {} elements; 1 to 2^56 are possible", size));
  }
  half_bits_ = std::max(1, (static_cast<int>(std::bit_width(static_cast<std::uint64_t>(size - 1))) + 1) / 2);
}

std::uint64_t Permutation::encrypt(std::uint64_t value) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  std::uint64_t left = value >> half_bits_, right = value & mask;
  for (std::uint64_t round = 0; round < rounds; ++round) {
    // Words are drawn at 4 * counter: each (round, right) has a block of its own.
    const RandomKey key{seed_, RandomPurpose::shuffling, epoch_};
    const std::uint64_t mixed = random_bits(key, (round << 40 | right) << 2);
    const std::uint64_t next = (left ^ mixed) & mask;
    left = right;
    right = next;
  }
  return left << half_bits_ | right;
}

std::int64_t Permutation::operator()(std::int64_t index) const {
  if (index < 0 || index >= size_) {
    throw InvalidArgument(fmt::format("index {} is not in a permutation of {} elements", index, size_));
  }
  auto value = static_cast<std::uint64_t>(index);
  do {
    value = encrypt(value);
  } while (value >= static_cast<std::uint64_t>(size_));
  return static_cast<std::int64_t>(value);
}

Windows::Windows(TokenRange range, std::int64_t sequence, std::string_view part)
    : range_(range), sequence_(sequence), count_((range.size - 1) / std::max<std::int64_t>(sequence, 1)) {
  if (sequence < 1) throw InvalidArgument(fmt::format("a window of {} tokens", sequence));
  if (count_ < 1) {
    throw ConfigurationError(fmt::format(
        "data file '{}' has {} tokens for {}, but one sequence of {} needs {}; give more data or a "
        "shorter --sequence",
        range.file->path(), range.size, part, sequence, sequence + 1));
  }
}

std::vector<std::int64_t> sample_numbers(const BatchShape& shape, std::int64_t first,
                                         std::int64_t micro_batch, std::int64_t rank) {
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(shape.micro_batch));
  const std::int64_t own = first + (micro_batch * shape.ranks + rank) * shape.micro_batch;
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = own + static_cast<std::int64_t>(i);
  return numbers;
}

std::int64_t window_of_sample(std::int64_t sample, std::int64_t windows, std::uint64_t seed) {
  return Permutation(windows, seed, static_cast<std::uint64_t>(sample / windows))(sample % windows);
}

std::vector<std::int64_t> evaluation_windows(std::int64_t windows, std::int64_t wanted) {
  const std::int64_t taken = wanted <= 0 ? windows : std::min(wanted, windows);
  std::vector<std::int64_t> chosen(static_cast<std::size_t>(taken));
  // k * windows / taken without its product, which may overflow.
  const std::int64_t whole = windows / taken, rest = windows % taken;
  for (std::int64_t k = 0; k < taken; ++k) chosen[static_cast<std::size_t>(k)] = k * whole + k * rest / taken;
  return chosen;
}

void read_windows(const Windows& windows, const std::vector<std::int64_t>& numbers, std::int64_t vocabulary,
                  std::vector<std::int32_t>& inputs, std::vector<std::int32_t>& targets,
                  RowDocuments* documents) {
  const auto sequence = static_cast<std::size_t>(windows.sequence());
  inputs.assign(numbers.size() * sequence, 0);
  targets.assign(numbers.size() * sequence, kernels::ignored_label);
  if (documents != nullptr) {
    documents->begin.assign(numbers.size() * sequence, 0);
    documents->positions.resize(numbers.size() * sequence);
    for (std::size_t i = 0; i < documents->positions.size(); ++i) {
      documents->positions[i] = static_cast<std::int32_t>(i % sequence);
    }
  }
  std::vector<std::int32_t> window(sequence + 1);
  std::vector<std::uint8_t> learned(sequence);
  const TokenFile& file = *windows.range().file;
  for (std::size_t row = 0; row < numbers.size(); ++row) {
    if (numbers[row] < 0) continue;
    const std::int64_t start = windows.start(numbers[row]);
    const std::size_t first = row * sequence;
    file.read(start, window, vocabulary);
    file.read_targets(start + 1, learned);
    std::copy_n(window.begin(), sequence, inputs.begin() + static_cast<std::ptrdiff_t>(first));
    for (std::size_t i = 0; i < sequence; ++i) {
      if (learned[i] != 0) targets[first + i] = window[i + 1];
    }
    // Documents that end in the row, which is where the next one begins.
    const std::span<const std::int64_t> ends = file.document_ends();
    auto end = std::upper_bound(ends.begin(), ends.end(), start);
    for (; end != ends.end() && *end <= start + windows.sequence(); ++end) {
      const auto next = static_cast<std::size_t>(*end - start);
      targets[first + next - 1] = kernels::ignored_label;
      for (std::size_t i = next; documents != nullptr && i < sequence; ++i) {
        documents->begin[first + i] = static_cast<std::int32_t>(next);
        documents->positions[first + i] = static_cast<std::int32_t>(i - next);
      }
    }
  }
}

}  // namespace tranche::data
