#pragma once
/// The samples of a step: a pure function of the seed and of the number of samples seen before, the same for
/// every number of ranks.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/training/token_file.h"

namespace tranche::training {

/// A permutation of 0 .. size-1 as a function: a Feistel network over the next even number of bits, keyed by
/// counter-based random numbers, applied repeatedly until the result falls inside (Black & Rogaway, "Ciphers
/// with arbitrary finite domains", 2002). Nothing is stored.
class Permutation {
 public:
  /// Throws InvalidArgument unless 1 <= size <= 2^56.
  Permutation(std::int64_t size, std::uint64_t seed, std::uint64_t epoch);
  std::int64_t size() const noexcept { return size_; }
  std::int64_t operator()(std::int64_t index) const;

 private:
  std::uint64_t encrypt(std::uint64_t value) const;
  std::int64_t size_;
  std::uint64_t seed_;
  std::uint64_t epoch_;
  int half_bits_;
};

/// Windows of sequence + 1 tokens (inputs, and the same shifted by one as targets) at multiples of `sequence`
/// in ranges of files: every token except the first of a range is a target once. Windows are numbered
/// consecutively over the ranges.
class Windows {
 public:
  /// Throws ConfigurationError naming the file when a range is shorter than one window; `part` names its
  /// purpose ("training").
  Windows(std::vector<TokenRange> ranges, std::int64_t sequence, std::string_view part);
  Windows(TokenRange range, std::int64_t sequence, std::string_view part)
      : Windows(std::vector<TokenRange>{range}, sequence, part) {}
  std::int64_t count() const noexcept { return first_.back(); }
  std::int64_t sequence() const noexcept { return sequence_; }
  const std::vector<TokenRange>& ranges() const noexcept { return ranges_; }
  /// The number of the first window of a range; for the number of ranges it is count().
  std::int64_t first(std::size_t range) const { return first_[range]; }
  /// The file of window `index`, and its position there.
  const TokenFile& file(std::int64_t index) const { return *ranges_[range_of(index)].file; }
  std::int64_t start(std::int64_t index) const;

 private:
  std::size_t range_of(std::int64_t index) const;
  std::vector<TokenRange> ranges_;
  std::int64_t sequence_;
  std::vector<std::int64_t> first_;
};

/// Assigns windows to a training's samples, from weighted sources: a pure function of the seed and of the
/// sample's number.
class Mixture {
 public:
  struct Source {
    std::string name;          ///< for errors
    std::int64_t windows = 0;  ///< numbered consecutively over the sources
    double weight = 1;         ///< its share of the samples; only ratios matter
  };
  /// Every `block` samples contain the same number from each source, the nearest to its share.
  static constexpr std::int64_t block = 65536;

  /// Throws ConfigurationError for weights that are not above 0, or so small that a block would have no
  /// sample.
  Mixture(std::vector<Source> sources, std::uint64_t seed);
  /// With one source it is window_of_sample(). With several, the shuffled position of a sample in its block
  /// determines the source and the count of earlier samples from it; each source is traversed repeatedly in
  /// its own order.
  std::int64_t window(std::int64_t sample) const;
  const std::vector<Source>& sources() const noexcept { return sources_; }

 private:
  std::vector<Source> sources_;
  std::uint64_t seed_;
  std::vector<std::int64_t> slots_;  ///< ends of the sources' positions in a block
};

/// Shape of a step: `micro_batch` sequences on each of `ranks` ranks, `accumulation` times.
struct BatchShape {
  std::int64_t micro_batch = 1;
  std::int64_t accumulation = 1;
  std::int64_t ranks = 1;
  std::int64_t step() const { return micro_batch * accumulation * ranks; }
};

/// The global sample numbers of micro-batch m on rank r in a step that begins with sample `first` (the number
/// used before: Engine::samples()). A step of batch size B takes samples first .. first + B - 1, and slot i
/// of (m, r) takes number (m * ranks + r) * micro_batch + i of them. So every division of the same B into
/// ranks, micro-batches and sequences contains the same set, and a run that continues with another B
/// continues in sequence.
std::vector<std::int64_t> sample_numbers(const BatchShape& shape, std::int64_t first,
                                         std::int64_t micro_batch, std::int64_t rank);

/// The window of global sample g: its epoch is g / windows, and within it the window is given by that epoch's
/// permutation.
std::int64_t window_of_sample(std::int64_t sample, std::int64_t windows, std::uint64_t seed);

/// `wanted` windows spread evenly over `windows` (all of them when fewer, or when wanted is 0), ascending:
/// the held-out windows are the same in every evaluation and for every number of ranks.
std::vector<std::int64_t> evaluation_windows(std::int64_t windows, std::int64_t wanted);

/// True if some target of a window is learned: the file marks it as learned, and it is not the first token of
/// a document. Reads the window. Throws the errors of TokenFile::read_targets().
bool has_target(const Windows& windows, std::int64_t window);

/// The documents within the rows of a batch, with one element per token.
struct RowDocuments {
  std::vector<std::int32_t> begin;      ///< index in the row of the document's begin
  std::vector<std::int32_t> positions;  ///< distance from there
};

/// Reads inputs and targets, with one row of `sequence` each per window. A window number of -1 gives a row of
/// zeros with targets kernels::ignored_label. This label also marks targets that the file excludes from
/// learning, and the first token of a document, which the previous document does not predict. A document cut
/// by a window's end counts as two: the later part does not see the earlier one.
void read_windows(const Windows& windows, const std::vector<std::int64_t>& numbers, std::int64_t vocabulary,
                  std::vector<std::int32_t>& inputs, std::vector<std::int32_t>& targets,
                  RowDocuments* documents = nullptr);

}  // namespace tranche::training
