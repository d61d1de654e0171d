#include "partition/box.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

namespace tranche::detail {

namespace {

__extension__ using Wide = __int128;

Wide floor_divide(Wide a, Wide b) {
  return a / b - (a % b < 0 ? 1 : 0);
}

/// The sum over i of [0, n) of floor((a * i + b) / m), by Euclid's algorithm; b may be negative.
Wide floor_sum(Wide n, Wide m, Wide a, Wide b) {
  Wide sum = n * floor_divide(b, m);
  b -= floor_divide(b, m) * m;
  while (n > 0) {
    sum += n * (n - 1) / 2 * (a / m) + n * (b / m);
    a %= m;
    b %= m;
    const Wide top = a * n + b;
    if (top < m) break;
    n = top / m;
    b = top % m;
    std::swap(m, a);
  }
  return sum;
}

bool meet(const Slice& a, const Slice& b) {
  // Blocks i of a and k of b overlap if i * a.stride - k * b.stride is in [low, high].
  const Wide low = Wide{b.start} - a.start - (a.block - 1), high = Wide{b.start} - a.start + b.block - 1;
  const Wide stride = a.stride, other = b.stride;
  const Wide first = std::max<Wide>(0, -floor_divide(-low, stride));
  const Wide last = std::min<Wide>(a.count - 1, floor_divide((Wide{b.count} - 1) * other + high, stride));
  if (first > last) return false;
  // Counts, over these i, the multiples of b's stride from i * stride - high to i * stride - low. Because of
  // the limits of i, one of them belongs to a block of b.
  const Wide n = last - first + 1, at = first * stride;
  return floor_sum(n, other, stride, at - low) > floor_sum(n, other, stride, at - high - 1);
}

/// Elements that are contiguous in memory for each index of dimension `axis`: a row of the later dimensions.
std::int64_t pitch(const Box& box, std::size_t axis) {
  std::int64_t elements = 1;
  for (std::size_t a = axis + 1; a < box.size(); ++a) elements *= box[a].size();
  return elements;
}

/// One traversal of common_runs().
class Walk {
 public:
  Walk(const Shape& shape, const Box& first, const Box& second, ElementRange within,
       const std::function<void(const CommonRun&)>& visit)
      : first_(first), second_(second), within_(within), visit_(visit), axes_(first.size()) {
    for (std::size_t a = axes_; a-- > 0;) {
      const std::int64_t extent = shape.extents()[a];
      if (a + 1 != axes_ || first[a].size() != extent || second[a].size() != extent) continue;
      axes_ = a;  // both hold all of the last dimensions, which are therefore contiguous in memory
      inner_ *= extent;
    }
    std::int64_t row = inner_;
    for (std::size_t a = axes_; a-- > 0;) {
      pitches_[a] = {pitch(first, a), pitch(second, a), row};
      row *= shape.extents()[a];
    }
  }

  void run(std::size_t axis, CommonRun at) {
    if (axis == axes_) {
      emit(at, inner_);
      return;
    }
    const Slice &a = first_[axis], &b = second_[axis];
    const Pitch& row = pitches_[axis];
    const std::int64_t end =
        std::min(a.size(), divide_round_up(std::max<std::int64_t>(within_.end - at.first, 0), row.first));
    for (std::int64_t i = std::max<std::int64_t>(0, (within_.begin - at.first) / row.first); i < end;) {
      const std::int64_t left = std::min(a.block - i % a.block, end - i), index = a.index(i);
      // The last block of b that begins at or before the index; block 0 if none does.
      const std::int64_t block = index < b.start ? 0 : (index - b.start) / b.stride;
      const std::int64_t behind = std::max<std::int64_t>(0, index - b.start - block * b.stride);
      const bool inside = index >= b.start && block < b.count && behind < b.block;
      if (!inside) {
        const std::int64_t next = index < b.start ? 0 : block + 1;
        const std::int64_t skip = next < b.count ? b.start + next * b.stride - index : left;
        i += std::min(left, skip);
        continue;
      }
      const std::int64_t common = std::min(left, b.block - behind), j = block * b.block + behind;
      const CommonRun begin{at.first + i * row.first, at.second + j * row.second,
                            at.tensor + index * row.tensor, 0};
      if (axis + 1 == axes_) {
        emit(begin, common * inner_);
      } else {
        for (std::int64_t k = 0; k < common; ++k) {
          run(axis + 1,
              {begin.first + k * row.first, begin.second + k * row.second, begin.tensor + k * row.tensor, 0});
        }
      }
      i += common;
    }
  }

 private:
  struct Pitch {
    std::int64_t first = 1, second = 1, tensor = 1;
  };

  void emit(CommonRun run, std::int64_t elements) const {
    const ElementRange part = intersect({run.first, run.first + elements}, within_);
    if (part.empty()) return;
    const std::int64_t skipped = part.begin - run.first;
    visit_({part.begin, run.second + skipped, run.tensor + skipped, part.size()});
  }

  const Box& first_;
  const Box& second_;
  ElementRange within_;
  const std::function<void(const CommonRun&)>& visit_;
  std::size_t axes_;  ///< the dimensions before the last ones of which both boxes hold all
  std::int64_t inner_ = 1;
  std::array<Pitch, Shape::max_rank> pitches_;
};

}  // namespace

Box whole_box(const Shape& shape) {
  Box box;
  for (const std::int64_t extent : shape.extents()) box.push_back({0, extent, 1, extent});
  return box;
}

std::int64_t elements_of(const Box& box) {
  std::int64_t elements = 1;
  for (const Slice& slice : box) elements *= slice.size();
  return elements;
}

std::string to_string(const Box& box) {
  std::string text;
  for (const Slice& slice : box) {
    const std::int64_t end = slice.index(slice.size() - 1) + 1;
    text += fmt::format("{}{}:{}", text.empty() ? "" : ", ", slice.start, end);
    if (end - slice.start != slice.size()) text += fmt::format(" by {} of {}", slice.stride, slice.block);
  }
  return "[" + text + "]";
}

bool lies_within(const Box& box, const Shape& shape) {
  if (box.size() != static_cast<std::size_t>(shape.rank())) return false;
  for (std::size_t a = 0; a < box.size(); ++a) {
    const Slice& slice = box[a];
    const std::int64_t extent = shape.extents()[a];
    if (slice.start < 0 || slice.block < 1 || slice.count < 1 || slice.stride < slice.block ||
        slice.start >= extent || slice.block > extent - slice.start ||
        slice.count - 1 > (extent - slice.start - slice.block) / slice.stride) {
      return false;
    }
  }
  return true;
}

bool meet(const Box& a, const Box& b) {
  for (std::size_t axis = 0; axis < a.size(); ++axis) {
    if (!meet(a[axis], b[axis])) return false;
  }
  return true;
}

bool holds_whole_blocks(const Box& box, const Shape& shape, std::int64_t block) {
  // The box's runs in the tensor consist of rows of the last dimensions of which it holds all, times a block
  // of the dimension before.
  std::int64_t run = 1;
  std::size_t axis = box.size();
  while (axis > 0 && box[axis - 1].size() == shape.extents()[axis - 1]) run *= shape.extents()[--axis];
  if (axis == 0) return true;  // the box is the whole tensor
  const std::int64_t elements = shape.elements();
  const Slice& slice = box[axis - 1];
  const std::int64_t row = run * shape.extents()[axis - 1];
  // Every run must begin and end at a block's boundary, or end with the tensor.
  const auto fits = [&](std::int64_t step, std::int64_t count) { return count == 1 || step % block == 0; };
  const bool joined = slice.count == 1 || slice.stride == slice.block;
  const std::int64_t begin = slice.start * run;
  const std::int64_t length = (joined ? slice.size() : slice.block) * run;
  bool good = joined || fits(slice.stride * run, slice.count);
  std::int64_t first = begin;
  std::int64_t last = begin + (joined ? 0 : (slice.count - 1) * slice.stride * run);
  std::int64_t pitch_of_row = row;
  for (std::size_t a = axis - 1; a-- > 0;) {
    const Slice& outer = box[a];
    good = good && fits(pitch_of_row, outer.block) && fits(outer.stride * pitch_of_row, outer.count);
    first += outer.start * pitch_of_row;
    last += outer.index(outer.size() - 1) * pitch_of_row;
    pitch_of_row *= shape.extents()[a];
  }
  const bool one = first == last;  // a single run may end with the tensor, within a block
  return good && first % block == 0 && (length % block == 0 || (one && first + length == elements));
}

void common_runs(const Shape& shape, const Box& first, const Box& second, ElementRange within,
                 const std::function<void(const CommonRun&)>& visit) {
  if (within.empty()) return;
  Walk(shape, first, second, within, visit).run(0, {});
}

std::vector<Box> boxes_of(const Box& box, ElementRange range) {
  std::vector<Box> boxes;
  if (box.empty() && !range.empty()) boxes.emplace_back();
  while (!box.empty() && range.begin < range.end) {
    // Finds the outermost dimension in which the range begins on an index and contains the whole index.
    std::size_t axis = 0;
    while (range.begin % pitch(box, axis) != 0 || range.begin + pitch(box, axis) > range.end) ++axis;
    Box part;
    std::int64_t rest = range.begin;
    for (std::size_t a = 0; a < box.size(); ++a) {
      const std::int64_t number = rest / pitch(box, a);
      rest %= pitch(box, a);
      if (a < axis) part.push_back({box[a].index(number), 1, 1, 1});
      if (a > axis) part.push_back(box[a]);
      if (a != axis) continue;
      const Slice& slice = box[a];
      const std::int64_t most = std::min((range.end - range.begin) / pitch(box, a), slice.size() - number);
      const std::int64_t into = number % slice.block;
      // Takes whole blocks if there are any, otherwise the rest of one.
      if (into == 0 && most >= slice.block) {
        part.push_back({slice.index(number), slice.stride, most / slice.block, slice.block});
      } else {
        part.push_back({slice.index(number), 1, 1, std::min(most, slice.block - into)});
        part.back().stride = part.back().block;
      }
    }
    range.begin += elements_of(part);
    boxes.push_back(std::move(part));
  }
  return boxes;
}

}  // namespace tranche::detail
