#include "tranche/training/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <span>
#include <utility>

#include "tranche/core/error.h"
#include "tranche/core/random.h"
#include "tranche/kernels/cross_entropy.h"

namespace tranche::training {

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
    // Words are drawn at 4 * counter, so each (round, right) has a separate block.
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

Windows::Windows(std::vector<TokenRange> ranges, std::int64_t sequence, std::string_view part)
    : ranges_(std::move(ranges)), sequence_(sequence), first_{0} {
  if (sequence < 1) throw InvalidArgument(fmt::format("a window of {} tokens", sequence));
  for (const TokenRange& range : ranges_) {
    const std::int64_t count = (range.size - 1) / sequence;
    if (count < 1) {
      throw ConfigurationError(fmt::format(
          "data file '{}' has {} tokens for {}, but one sequence of {} needs {}; give more data or a "
          "shorter --sequence{}",
          range.file->path(), range.size, part, sequence, sequence + 1,
          ranges_.size() > 1 ? ", or put the files into one with tranche tokenize" : ""));
    }
    first_.push_back(first_.back() + count);
  }
}

std::size_t Windows::range_of(std::int64_t index) const {
  return static_cast<std::size_t>(std::upper_bound(first_.begin(), first_.end() - 1, index) -
                                  first_.begin()) -
         1;
}

std::int64_t Windows::start(std::int64_t index) const {
  const std::size_t range = range_of(index);
  return ranges_[range].begin + (index - first_[range]) * sequence_;
}

Mixture::Mixture(std::vector<Source> sources, std::uint64_t seed)
    : sources_(std::move(sources)), seed_(seed) {
  double sum = 0, passed = 0;
  for (const Source& source : sources_) {
    if (!(source.weight > 0) || !std::isfinite(source.weight)) {
      throw ConfigurationError(
          fmt::format("'{}' has the weight {}, but weights are above 0", source.name, source.weight));
    }
    sum += source.weight;
  }
  for (const Source& source : sources_) {
    passed += source.weight;
    const auto end = static_cast<std::int64_t>(std::llround(passed / sum * static_cast<double>(block)));
    if (end == (slots_.empty() ? 0 : slots_.back())) {
      throw ConfigurationError(fmt::format("'{}' has the weight {} of {}: less than one of {} samples",
                                           source.name, source.weight, sum, block));
    }
    slots_.push_back(end);
  }
}

std::int64_t Mixture::window(std::int64_t sample) const {
  if (sources_.size() == 1) return window_of_sample(sample, sources_[0].windows, seed_);
  // The positions in blocks have one seed, and each source has another.
  const std::int64_t place =
      Permutation(block, seed_ + sources_.size(), static_cast<std::uint64_t>(sample / block))(sample % block);
  std::int64_t begin = 0, first = 0;
  std::size_t source = 0;
  for (; place >= slots_[source]; ++source) {
    begin = slots_[source];
    first += sources_[source].windows;
  }
  const std::int64_t own = sample / block * (slots_[source] - begin) + (place - begin);
  return first + window_of_sample(own, sources_[source].windows, seed_ + source);
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
  // Computes k * windows / taken without the product, which may overflow.
  const std::int64_t whole = windows / taken, rest = windows % taken;
  for (std::int64_t k = 0; k < taken; ++k) chosen[static_cast<std::size_t>(k)] = k * whole + k * rest / taken;
  return chosen;
}

namespace {

/// Reads whether each target of a window, the token after its position, is learned.
void read_learned(const Windows& windows, std::int64_t window, std::span<std::uint8_t> learned) {
  const TokenFile& file = windows.file(window);
  const std::int64_t start = windows.start(window);
  file.read_targets(start + 1, learned);
  // The first token of a document is not learned, because the one before it does not predict it.
  const std::span<const std::int64_t> ends = file.document_ends();
  for (auto end = std::upper_bound(ends.begin(), ends.end(), start);
       end != ends.end() && *end <= start + windows.sequence(); ++end) {
    learned[static_cast<std::size_t>(*end - start - 1)] = 0;
  }
}

}  // namespace

bool has_target(const Windows& windows, std::int64_t window) {
  std::vector<std::uint8_t> learned(static_cast<std::size_t>(windows.sequence()));
  read_learned(windows, window, learned);
  return std::any_of(learned.begin(), learned.end(), [](std::uint8_t each) { return each != 0; });
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
  for (std::size_t row = 0; row < numbers.size(); ++row) {
    if (numbers[row] < 0) continue;
    const TokenFile& file = windows.file(numbers[row]);
    const std::int64_t start = windows.start(numbers[row]);
    const std::size_t first = row * sequence;
    file.read(start, window, vocabulary);
    read_learned(windows, numbers[row], learned);
    std::copy_n(window.begin(), sequence, inputs.begin() + static_cast<std::ptrdiff_t>(first));
    for (std::size_t i = 0; i < sequence; ++i) {
      if (learned[i] != 0) targets[first + i] = window[i + 1];
    }
    if (documents == nullptr) continue;
    // The ends of documents within the row are the begins of the next ones; an end at the row's end begins
    // none.
    const std::span<const std::int64_t> ends = file.document_ends();
    const std::int64_t last = start + windows.sequence();
    for (auto end = std::upper_bound(ends.begin(), ends.end(), start); end != ends.end() && *end < last;
         ++end) {
      const auto next = static_cast<std::size_t>(*end - start);
      for (std::size_t i = next; i < sequence; ++i) {
        documents->begin[first + i] = static_cast<std::int32_t>(next);
        documents->positions[first + i] = static_cast<std::int32_t>(i - next);
      }
    }
  }
}

}  // namespace tranche::training
