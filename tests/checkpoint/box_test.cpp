// Compares boxes with the sets of their elements, and writes and reads layouts of drawn boxes.

#include "partition/box.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <random>
#include <set>

#include "../offload/test_folder.h"
#include "checkpoint/reader.h"
#include "sample.h"
#include "tests/core/rounds.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {
namespace {

using namespace tranche::testing;

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}
  std::int64_t operator()(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random_);
  }

 private:
  std::mt19937_64 random_;
};

Slice draw_slice(Draw& draw, std::int64_t extent) {
  Slice slice;
  slice.start = draw(0, extent - 1);
  slice.block = draw(1, extent - slice.start);
  if (draw(0, 2) > 0) slice.block = std::min<std::int64_t>(slice.block, 3);
  slice.stride = slice.block + draw(0, 4);
  slice.count = draw(1, (extent - slice.start - slice.block) / slice.stride + 1);
  return slice;
}

Shape draw_shape(Draw& draw, int most_rank, std::int64_t most_extent) {
  std::vector<std::int64_t> extents(static_cast<std::size_t>(draw(0, most_rank)));
  for (std::int64_t& extent : extents) extent = draw(1, most_extent);
  return Shape(extents);
}

Box draw_box(Draw& draw, const Shape& shape) {
  Box box;
  for (const std::int64_t extent : shape.extents()) {
    box.push_back(draw(0, 2) == 0 ? Slice{0, extent, 1, extent} : draw_slice(draw, extent));
  }
  return box;
}

std::vector<std::int64_t> elements_in(const Box& box, const Shape& shape) {
  std::vector<std::int64_t> elements;
  for (std::int64_t i = 0; i < elements_of(box); ++i) elements.push_back(element_of(box, shape, i));
  return elements;
}

TEST(Boxes, AreTheSetsOfTheirElements) {
  for (const int round : test::rounds(4000)) {
    Draw draw(static_cast<std::uint64_t>(round));
    SCOPED_TRACE("seed " + std::to_string(round));
    const Shape shape = draw_shape(draw, 4, 9);
    const Box a = draw_box(draw, shape), b = draw_box(draw, shape);
    ASSERT_TRUE(lies_within(a, shape)) << to_string(a);
    const std::vector<std::int64_t> in_a = elements_in(a, shape), in_b = elements_in(b, shape);
    ASSERT_TRUE(std::is_sorted(in_a.begin(), in_a.end()));
    std::vector<std::int64_t> common;
    std::set_intersection(in_a.begin(), in_a.end(), in_b.begin(), in_b.end(), std::back_inserter(common));
    ASSERT_EQ(meet(a, b), !common.empty()) << to_string(a) << " " << to_string(b);

    // Runs must contain each element once, with its three numbers.
    const std::int64_t begin = draw(0, elements_of(a)), end = draw(begin, elements_of(a));
    std::vector<std::int64_t> runs;
    std::int64_t reached = begin;
    common_runs(shape, a, b, {begin, end}, [&](const CommonRun& run) {
      ASSERT_GE(run.first, reached);
      reached = run.first + run.elements;
      for (std::int64_t e = 0; e < run.elements; ++e) {
        ASSERT_EQ(in_a.at(static_cast<std::size_t>(run.first + e)), run.tensor + e);
        ASSERT_EQ(in_b.at(static_cast<std::size_t>(run.second + e)), run.tensor + e);
        runs.push_back(run.tensor + e);
      }
    });
    std::erase_if(common, [&](std::int64_t element) {
      const auto number = std::lower_bound(in_a.begin(), in_a.end(), element) - in_a.begin();
      return number < begin || number >= end;
    });
    ASSERT_EQ(runs, common) << to_string(a) << " " << to_string(b) << " " << begin << " to " << end;

    std::vector<std::int64_t> parts;
    for (const Box& part : boxes_of(a, {begin, end})) {
      ASSERT_TRUE(lies_within(part, shape)) << to_string(part);
      for (const std::int64_t element : elements_in(part, shape)) parts.push_back(element);
    }
    ASSERT_EQ(parts, std::vector<std::int64_t>(in_a.begin() + begin, in_a.begin() + end)) << to_string(a);

    // A box may consist of whole blocks by chance, if its runs touch.
    const std::int64_t block = draw(2, 4);
    bool whole = true;
    for (const std::int64_t element : in_a) {
      for (std::int64_t e = element / block * block;
           e < std::min((element / block + 1) * block, shape.elements()); ++e) {
        whole = whole && std::binary_search(in_a.begin(), in_a.end(), e);
      }
    }
    if (holds_whole_blocks(a, shape, block)) {
      ASSERT_TRUE(whole) << to_string(a) << " in blocks of " << block;
    } else if (a == whole_box(shape)) {
      FAIL() << "all of a tensor is whole blocks";
    }
  }
}

TEST(Boxes, ThatAreHugeMeetAtOnce) {
  const std::int64_t extent = std::int64_t{1} << 59;
  const Shape shape{extent};
  const Box even{{0, 2, extent / 2, 1}}, odd{{1, 2, extent / 2, 1}}, thirds{{1, 3, extent / 3, 1}};
  EXPECT_TRUE(lies_within(even, shape));
  EXPECT_FALSE(meet(even, odd));
  EXPECT_TRUE(meet(even, thirds));
  EXPECT_TRUE(meet(odd, thirds));
  EXPECT_FALSE(meet(Box{{0, 6, extent / 6, 2}}, Box{{2, 6, extent / 6, 4}}));
  EXPECT_TRUE(meet(Box{{0, 6, extent / 6, 3}}, Box{{2, 6, extent / 6, 4}}));
  std::int64_t seen = 0;
  common_runs(shape, even, thirds, {0, 1000}, [&](const CommonRun& run) { seen += run.elements; });
  EXPECT_EQ(seen, 333);
}

TEST(Boxes, AreShownAsSlices) {
  EXPECT_EQ(to_string(Box{{0, 4, 1, 4}, {8, 16, 2, 8}}), "[0:4, 8:32 by 16 of 8]");
  EXPECT_EQ(to_string(Box{}), "[]");
}

/// Slices of an extent that contain each index once.
std::vector<Slice> draw_partition(Draw& draw, std::int64_t extent, std::int64_t unit) {
  const std::int64_t parts = draw(1, 3);
  // Block-cyclic slices: every `parts`-th block of `block` indices, if that divides the extent.
  for (const std::int64_t block : {unit, 2 * unit}) {
    if (draw(0, 1) == 0 || extent % (parts * block) != 0) continue;
    std::vector<Slice> slices;
    for (std::int64_t p = 0; p < parts; ++p)
      slices.push_back({p * block, parts * block, extent / (parts * block), block});
    return slices;
  }
  std::vector<Slice> slices;
  std::int64_t begin = 0;
  for (std::int64_t p = 0; p < parts && begin < extent; ++p) {
    const std::int64_t end =
        p + 1 == parts ? extent : std::min(extent, (begin + draw(1, extent)) / unit * unit);
    if (end <= begin) continue;
    slices.push_back({begin, end - begin, 1, end - begin});
    begin = end;
  }
  if (begin < extent) slices.push_back({begin, extent - begin, 1, extent - begin});
  return slices;
}

/// Tensors that are cut into drawn boxes, which are distributed over buffers and ranks; in blocks of `block`
/// elements.
Layout draw_layout(Draw& draw, std::int64_t block) {
  Layout layout;
  layout.world = static_cast<int>(draw(1, 5));
  if (layout.world > 1) layout.mesh = {{"tensor", layout.world}};
  const int tensors = static_cast<int>(draw(1, 3));
  UnitRecord unit{"u", 1, {}, {{"a", false, {}, {}}, {"b", false, {}, {}}}};
  std::vector<std::pair<int, Box>> boxes;
  for (int t = 0; t < tensors; ++t) {
    const bool blocks = block > 1;
    std::vector<std::int64_t> extents(static_cast<std::size_t>(draw(0, 3)));
    for (std::int64_t& extent : extents) extent = draw(1, 9);
    if (blocks && !extents.empty()) extents.back() *= block;  // rows of whole blocks
    const Shape shape(extents);
    unit.tensors.push_back({"t" + std::to_string(t), shape, false, {}});
    std::vector<Box> of_tensor{{}};
    for (std::size_t a = 0; a < extents.size(); ++a) {
      std::vector<Box> longer;
      for (const Slice& slice :
           draw_partition(draw, extents[a], blocks && a + 1 == extents.size() ? block : 1)) {
        for (Box box : of_tensor) {
          box.push_back(slice);
          longer.push_back(std::move(box));
        }
      }
      of_tensor = std::move(longer);
    }
    for (Box& box : of_tensor) boxes.emplace_back(t, std::move(box));
  }
  for (std::size_t next = 0; next < boxes.size();) {
    InstanceRecord instance;
    std::int64_t end = 0;
    for (std::int64_t i = draw(1, 4); i > 0 && next < boxes.size(); --i, ++next) {
      end = round_up(end, block) + block * draw(0, 2);
      instance.tensors.push_back({boxes[next].first, boxes[next].second, end});
      end += elements_of(boxes[next].second);
    }
    end = round_up(end, block) + block * draw(0, 2);
    for (std::int64_t begin = 0; begin < end;) {
      const std::int64_t stop = draw(0, 2) == 0 ? end : std::min(end, begin + block * draw(1, end / block));
      instance.ranges.push_back({static_cast<int>(draw(0, layout.world - 1)), begin, stop, 0});
      begin = stop;
    }
    unit.buffers[static_cast<std::size_t>(draw(0, 1))].instances.push_back(std::move(instance));
  }
  layout.units = {unit};
  layout.sections = {{"weights", "weight", DataType::float32, false},
                     {"state/m", "m", DataType::bfloat16, false}};
  if (block > 1)
    layout.sections.push_back({"state/q", "q", DataType::uint8, false, {"q8", block, block + 2}});
  layout.place();
  return layout;
}

TEST(Layouts, OfMoreBoxesThanAreReadAreRefusedSoon) {
  const std::int64_t boxes = 4200;  // they form 8.8 million pairs
  Layout layout;
  layout.sections = {{"weights", "weight", DataType::float32, false}};
  layout.units = {{"u", 1, {{"w", Shape{boxes}, false, {}}}, {{"a", false, {}, {}}}}};
  for (std::int64_t i = 0; i < boxes; ++i) {
    layout.units[0].buffers[0].instances.push_back({{{0, {{i, 1, 1, 1}}, 0}}, {{0, 0, 1, 0}}});
  }
  EXPECT_EQ(layout.fault(), "unit 'u': its tensors are cut into more boxes than are read");
  for (std::int64_t i = 1000; i < boxes; ++i) layout.units[0].buffers[0].instances.pop_back();
  layout.units[0].tensors[0].shape = Shape{1000};
  EXPECT_EQ(layout.fault(), "");
}

TEST(DrawnLayouts, AreWrittenAndReadInBoxes) {
  const TestFolder folder{fast_folder()};
  const TestStorage storage(detail::posix_file_system());
  for (const int round : test::rounds(120)) {
    Draw draw(static_cast<std::uint64_t>(round) + 1000);
    SCOPED_TRACE("seed " + std::to_string(round + 1000));
    const Layout layout = draw_layout(draw, round % 2 == 0 ? 1 : draw(2, 5));
    ASSERT_EQ(layout.fault(), "");
    const std::string path =
        save_sample(storage, folder / "run", layout, round + 1, round % 3 == 0 ? Way::image : Way::pieces);
    Reader reader(storage, path);
    ASSERT_EQ(reader.layout(), layout);
    expect_sample(reader);
    if (::testing::Test::HasFailure()) return;
    for (const StoredTensor& tensor : reader.tensors()) {
      const Box box = draw_box(draw, tensor.shape);
      const std::int64_t begin = draw(0, elements_of(box)), end = draw(begin, elements_of(box));
      std::vector<float> values(static_cast<std::size_t>(end - begin) + 1, -7.0f);
      reader.read_tensor(tensor.name, "m", {begin, end}, DataType::float32, values.data(), box);
      for (std::int64_t i = begin; i < end; ++i) {
        ASSERT_EQ(values[static_cast<std::size_t>(i - begin)],
                  sample_value("m", tensor.name, element_of(box, tensor.shape, i), DataType::bfloat16))
            << tensor.name << " " << to_string(box) << " number " << i;
      }
      ASSERT_EQ(values.back(), -7.0f) << "memory behind the last element";
    }
    // One number of one box is changed. Either each element is still stored once, or the layout is invalid.
    for (int change = 0; change < 20; ++change) {
      Layout changed = layout;
      for (BufferRecord& buffer : changed.units[0].buffers) {
        for (InstanceRecord& instance : buffer.instances) {
          PlacedTensor& placed = instance.tensors.front();
          if (placed.box.empty() || draw(0, 1) == 0) continue;
          Slice& slice =
              placed.box[static_cast<std::size_t>(draw(0, static_cast<std::int64_t>(placed.box.size()) - 1))];
          std::int64_t* const numbers[] = {&slice.start, &slice.stride, &slice.count, &slice.block};
          *numbers[draw(0, 3)] += draw(0, 1) == 0 ? -1 : 1;
        }
      }
      bool once = true;
      std::vector<std::multiset<std::int64_t>> stored(changed.units[0].tensors.size());
      for (const BufferRecord& buffer : changed.units[0].buffers) {
        for (const InstanceRecord& instance : buffer.instances) {
          for (const PlacedTensor& placed : instance.tensors) {
            const Shape& shape = changed.units[0].tensors[static_cast<std::size_t>(placed.tensor)].shape;
            once = once && lies_within(placed.box, shape);
            if (!once) break;
            for (const std::int64_t element : elements_in(placed.box, shape)) {
              stored[static_cast<std::size_t>(placed.tensor)].insert(element);
            }
          }
        }
      }
      for (std::size_t t = 0; t < stored.size(); ++t) {
        const std::int64_t elements = changed.units[0].tensors[t].shape.elements();
        once = once && static_cast<std::int64_t>(stored[t].size()) == elements &&
               std::set<std::int64_t>(stored[t].begin(), stored[t].end()).size() == stored[t].size();
      }
      if (!once) {
        ASSERT_NE(changed.fault(), "");
      }
    }
  }
}

}  // namespace
}  // namespace tranche::checkpoint
