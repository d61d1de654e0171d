// Compares layouts for drawn sizes and ranks with maps that list every element. A failure prints the seed
// that reproduces it.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "partition/flat_layout.h"
#include "tranche/core/random.h"

namespace tranche {
namespace {

using detail::ElementRange;
using detail::FlatLayout;
using detail::shard_multiple_elements;
using detail::TensorPiece;

constexpr std::uint64_t cases = 300;
using Element = std::pair<int, std::int64_t>;  // tensor, element within it
constexpr Element padding{-1, 0};

struct Drawn {
  std::vector<std::int64_t> sizes;
  int ranks = 1;
  int other_ranks = 1;
  std::int64_t bucket = 1;
  std::string text;
};

/// Sizes are mostly near the alignment, the shard multiple and primes; one in four layouts has a tensor of
/// thousands of elements.
Drawn draw(std::uint64_t seed) {
  const RandomKey key{seed, RandomPurpose::test, 77};
  std::uint64_t at = 0;
  const auto below = [&](std::uint32_t bound) { return static_cast<int>(random_bits(key, at++) % bound); };
  const std::vector<std::int64_t> special{1, 2, 63, 64, 65, 127, 128, 251, 255, 256, 257, 509, 512, 513};
  Drawn drawn;
  const int tensors = below(8);
  for (int i = 0; i < tensors; ++i) {
    const bool odd = below(2) == 0;
    drawn.sizes.push_back(
        odd ? special[static_cast<std::size_t>(below(static_cast<std::uint32_t>(special.size())))]
            : 1 + below(400));
  }
  if (tensors > 0 && below(4) == 0)
    drawn.sizes[static_cast<std::size_t>(below(static_cast<std::uint32_t>(tensors)))] = 1000 + below(4000);
  drawn.ranks = 1 + below(9);
  drawn.other_ranks = 1 + below(9);
  drawn.bucket = 1 + below(6000);
  drawn.text = "seed " + std::to_string(seed) + ": FlatLayout({";
  for (const auto size : drawn.sizes) drawn.text += std::to_string(size) + ", ";
  drawn.text += "}, " + std::to_string(drawn.ranks) + "), other ranks " + std::to_string(drawn.other_ranks) +
                ", bucket " + std::to_string(drawn.bucket);
  return drawn;
}

/// The element at every position of the buffer, determined from the definition of the format.
std::vector<Element> list_of_elements(const FlatLayout& layout, const std::vector<std::int64_t>& sizes) {
  std::vector<Element> list;
  for (std::size_t t = 0; t < sizes.size(); ++t) {
    while (list.size() % 64 != 0) list.push_back(padding);
    for (std::int64_t i = 0; i < sizes[t]; ++i) list.emplace_back(static_cast<int>(t), i);
  }
  const auto ranks = static_cast<std::size_t>(layout.ranks());
  while (list.size() % (256 * ranks) != 0) list.push_back(padding);
  return list;
}

TEST(FlatLayoutLaws, BufferIsTheListOfElements) {
  for (std::uint64_t seed = 0; seed < cases; ++seed) {
    const Drawn drawn = draw(seed);
    SCOPED_TRACE(drawn.text);
    const FlatLayout layout(drawn.sizes, drawn.ranks);
    const auto list = list_of_elements(layout, drawn.sizes);
    ASSERT_EQ(layout.padded_elements(), static_cast<std::int64_t>(list.size()));
    ASSERT_EQ(layout.padded_elements(), layout.shard_elements() * layout.ranks());
    std::int64_t real = 0;
    for (std::int64_t place = 0; place < layout.padded_elements(); ++place) {
      const Element wanted = list[static_cast<std::size_t>(place)];
      const TensorPiece found = layout.locate(place);
      ASSERT_EQ(Element(found.tensor, found.tensor_begin), wanted) << "place " << place;
      ASSERT_EQ(found.buffer_begin, place);
      ASSERT_EQ(found.elements, wanted == padding ? 0 : 1);
      if (wanted == padding) continue;
      ++real;
      ASSERT_EQ(layout.tensor_offset(wanted.first) + wanted.second, place);
    }
    ASSERT_EQ(layout.elements(), real);
  }
}

TEST(FlatLayoutLaws, ShardsTileTheBufferAndPiecesCoverEveryElementOnce) {
  for (std::uint64_t seed = 0; seed < cases; ++seed) {
    const Drawn drawn = draw(seed);
    SCOPED_TRACE(drawn.text);
    const FlatLayout layout(drawn.sizes, drawn.ranks);
    const auto list = list_of_elements(layout, drawn.sizes);
    std::vector<int> covered(list.size(), 0);
    std::int64_t end = 0;
    for (int rank = 0; rank < layout.ranks(); ++rank) {
      const ElementRange shard = layout.shard_range(rank);
      ASSERT_EQ(shard.begin, end);
      ASSERT_EQ(shard.begin % shard_multiple_elements, 0);
      end = shard.end;
      std::int64_t owned = 0;
      std::int64_t previous_end = shard.begin;
      for (const TensorPiece& piece : layout.shard_pieces(rank)) {
        ASSERT_GT(piece.elements, 0);
        ASSERT_GE(piece.buffer_begin, previous_end);
        previous_end = piece.buffer_begin + piece.elements;
        ASSERT_LE(previous_end, shard.end);
        owned += piece.elements;
        for (std::int64_t i = 0; i < piece.elements; ++i) {
          const auto place = static_cast<std::size_t>(piece.buffer_begin + i);
          ASSERT_EQ(list[place], Element(piece.tensor, piece.tensor_begin + i));
          ++covered[place];
        }
      }
      ASSERT_EQ(layout.owned_elements(rank), owned);
    }
    ASSERT_EQ(end, layout.padded_elements());
    for (std::size_t i = 0; i < list.size(); ++i) ASSERT_EQ(covered[i], list[i] == padding ? 0 : 1) << i;
  }
}

TEST(FlatLayoutLaws, PiecesOfAnyRangeMatchTheList) {
  for (std::uint64_t seed = 0; seed < cases; ++seed) {
    const Drawn drawn = draw(seed);
    SCOPED_TRACE(drawn.text);
    const FlatLayout layout(drawn.sizes, drawn.ranks);
    if (layout.padded_elements() == 0) continue;
    const auto list = list_of_elements(layout, drawn.sizes);
    const RandomKey key{seed, RandomPurpose::test, 78};
    const auto places = static_cast<std::uint64_t>(layout.padded_elements()) + 1;
    for (std::uint64_t trial = 0; trial < 10; ++trial) {
      const auto a = static_cast<std::int64_t>(random_bits(key, 2 * trial) % places);
      const auto b = static_cast<std::int64_t>(random_bits(key, 2 * trial + 1) % places);
      const ElementRange range{std::min(a, b), std::max(a, b)};
      std::vector<Element> wanted;
      for (std::int64_t i = range.begin; i < range.end; ++i) {
        if (const Element& element = list[static_cast<std::size_t>(i)]; element != padding)
          wanted.push_back(element);
      }
      std::vector<Element> got;
      for (const TensorPiece& piece : layout.pieces(range)) {
        for (std::int64_t i = 0; i < piece.elements; ++i)
          got.emplace_back(piece.tensor, piece.tensor_begin + i);
      }
      ASSERT_EQ(got, wanted) << "range [" << range.begin << ", " << range.end << ")";
    }
  }
}

TEST(FlatLayoutLaws, OverlapsMoveEveryElementOnceToItsPlace) {
  for (std::uint64_t seed = 0; seed < cases; ++seed) {
    const Drawn drawn = draw(seed);
    SCOPED_TRACE(drawn.text);
    const FlatLayout from(drawn.sizes, drawn.ranks);
    const FlatLayout to(drawn.sizes, drawn.other_ranks);
    const auto source = list_of_elements(from, drawn.sizes);
    const auto destination = list_of_elements(to, drawn.sizes);
    for (int rank = 0; rank < to.ranks(); ++rank) {
      const auto shard = static_cast<std::size_t>(to.shard_elements());
      std::vector<Element> moved(shard, padding);
      std::vector<int> written(shard, 0);
      std::int64_t previous_end = 0;
      for (const detail::OverlapPiece& piece : detail::overlaps(from, to, rank)) {
        ASSERT_GT(piece.elements, 0);
        ASSERT_LE(piece.source_begin + piece.elements, from.shard_elements());
        ASSERT_GE(piece.destination_begin, previous_end);
        previous_end = piece.destination_begin + piece.elements;
        ASSERT_LE(previous_end, to.shard_elements());
        for (std::int64_t i = 0; i < piece.elements; ++i) {
          const auto from_place =
              static_cast<std::size_t>(from.shard_range(piece.source_rank).begin + piece.source_begin + i);
          const auto to_place = static_cast<std::size_t>(piece.destination_begin + i);
          ASSERT_NE(source[from_place], padding);
          moved[to_place] = source[from_place];
          ++written[to_place];
        }
      }
      for (std::size_t i = 0; i < shard; ++i) {
        const Element wanted = destination[static_cast<std::size_t>(rank) * shard + i];
        ASSERT_EQ(moved[i], wanted) << "rank " << rank << " place " << i;
        ASSERT_EQ(written[i], wanted == padding ? 0 : 1) << "rank " << rank << " place " << i;
      }
    }
  }
}

TEST(FlatLayoutLaws, BucketsTileTheShard) {
  for (std::uint64_t seed = 0; seed < cases; ++seed) {
    const Drawn drawn = draw(seed);
    SCOPED_TRACE(drawn.text);
    const FlatLayout layout(drawn.sizes, drawn.ranks);
    const auto buckets = detail::bucket_ranges(layout, drawn.bucket);
    std::int64_t end = 0;
    for (const ElementRange& bucket : buckets) {
      ASSERT_EQ(bucket.begin, end);
      ASSERT_GT(bucket.size(), 0);
      ASSERT_EQ(bucket.size() % shard_multiple_elements, 0);
      ASSERT_LE(bucket.size(), std::max(shard_multiple_elements, drawn.bucket / drawn.ranks));
      if (&bucket != &buckets.back()) {
        ASSERT_EQ(bucket.size(), buckets.front().size());
      }
      end = bucket.end;
    }
    ASSERT_EQ(end, layout.shard_elements());
  }
}

}  // namespace
}  // namespace tranche
