// Compares CPU and GPU bit by bit, on memory of the device: new random inputs, poisoned outputs, every small
// size and some large ones, and addresses that prevent vector accesses.

#include <functional>

#include "host_tensor.h"
#include "tests/core/rounds.h"
#include "tests/device/as_on_gpu.h"
#include "tranche/kernels/copy_columns.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/embedding.h"
#include "tranche/kernels/optimizer_update.h"
#include "tranche/kernels/quantization.h"
#include "tranche/kernels/reduction.h"
#include "tranche/kernels/rope.h"
#include "tranche/kernels/squared_error.h"

namespace tranche::kernels::testing {
namespace {

/// Bytes that start `shift` bytes after an aligned address of a device, with poison around them.
class Placed {
 public:
  Placed(Device& device, const std::vector<unsigned char>& bytes, std::int64_t shift)
      : device_(device),
        bytes_(static_cast<std::int64_t>(bytes.size())),
        shift_(border + shift),
        buffer_(device.memory(Tier::device), shift_ + bytes_ + border, Category::other, "test tensor") {
    std::vector<unsigned char> image(static_cast<std::size_t>(shift_ + bytes_ + border), poison);
    std::copy(bytes.begin(), bytes.end(), image.begin() + shift_);
    device.copy_from_host(device.compute_stream(), buffer_.data(), image.data(), shift_ + bytes_ + border);
  }
  void* data() { return static_cast<char*>(buffer_.data()) + shift_; }
  std::vector<unsigned char> read() {
    std::vector<unsigned char> image(static_cast<std::size_t>(shift_ + bytes_ + border));
    device_.copy_to_host(device_.compute_stream(), image.data(), buffer_.data(), shift_ + bytes_ + border);
    device_.compute_stream().synchronize();
    for (std::int64_t i = 0; i < shift_ + bytes_ + border; ++i) {
      if (i >= shift_ && i < shift_ + bytes_) continue;
      if (image[static_cast<std::size_t>(i)] != poison) {
        ADD_FAILURE() << "wrote outside, at byte " << i - shift_ << " of " << bytes_;
        break;
      }
    }
    return {image.begin() + shift_, image.begin() + shift_ + bytes_};
  }

 private:
  static constexpr std::int64_t border = 64;
  static constexpr unsigned char poison = 0xcd;
  Device& device_;
  std::int64_t bytes_, shift_;
  Buffer buffer_;
};

/// An operand of a call: its initial bytes, and its offset from alignment.
struct Operand {
  DataType dtype;
  std::int64_t elements;
  std::vector<unsigned char> bytes;
  std::int64_t shift_elements = 0;
};
using Call = std::function<void(Stream&, const std::vector<TensorView>&, const Workspace&)>;

/// The bytes of all operands after the call on a device of this kind.
std::vector<std::vector<unsigned char>> outcome(DeviceKind kind, const std::vector<Operand>& operands,
                                                const Call& call, std::int64_t workspace_bytes) {
  const auto cpu = kind == DeviceKind::cpu ? make_device({.kind = kind}) : nullptr;
  Device& device = cpu ? *cpu : test_gpu();
  std::vector<Placed> placed;
  placed.reserve(operands.size());
  std::vector<TensorView> views;
  for (const Operand& operand : operands) {
    placed.emplace_back(device, operand.bytes, operand.shift_elements * size_of(operand.dtype));
    views.push_back({placed.back().data(), operand.dtype, Shape{operand.elements}});
  }
  const Buffer scratch(device.memory(Tier::device), workspace_bytes, Category::workspace, "test workspace");
  device.fill_bytes(device.compute_stream(), scratch.data(), 0xff, workspace_bytes);
  call(device.compute_stream(), views, {scratch.data(), workspace_bytes});
  std::vector<std::vector<unsigned char>> results;
  for (Placed& each : placed) results.push_back(each.read());
  return results;
}

void expect_equal_bits(const std::vector<Operand>& operands, const Call& call, const std::string& what,
                       std::int64_t workspace_bytes = 65536) {
  const auto wanted = outcome(DeviceKind::cpu, operands, call, workspace_bytes);
  const auto got = outcome(DeviceKind::cuda, operands, call, workspace_bytes);
  for (std::size_t i = 0; i < operands.size(); ++i) {
    if (got[i] == wanted[i]) continue;
    std::size_t byte = 0;
    while (got[i][byte] == wanted[i][byte]) ++byte;
    ADD_FAILURE() << what << ": operand " << i << " differs at element "
                  << static_cast<std::int64_t>(byte) / size_of(operands[i].dtype) << " of "
                  << operands[i].elements << "; " << repeat_line();
  }
}

class Cases {
 public:
  explicit Cases(std::uint64_t salt) : random_(salt) {}
  Operand numbers(DataType dtype, std::int64_t elements, bool positive = false) {
    HostTensor tensor = random_.tensor(dtype, {elements}, positive ? 0.001 : -1, 1);
    const TestBytes& bytes = tensor.bytes();
    return {dtype, elements, {bytes.begin(), bytes.begin() + elements * size_of(dtype)}, shift()};
  }
  Operand poisoned(DataType dtype, std::int64_t elements) {
    return {dtype, elements,
            std::vector<unsigned char>(static_cast<std::size_t>(elements * size_of(dtype)), 0xff), shift()};
  }
  /// Random bits.
  Operand patterns(DataType dtype, std::int64_t elements) {
    Operand operand = poisoned(dtype, elements);
    for (auto& byte : operand.bytes) byte = static_cast<unsigned char>(random_.integer(0, 255));
    return operand;
  }
  Random& random() { return random_; }
  /// All operands have equal offsets, so that vector accesses are possible, or each has its own.
  void draw_shifts(bool alike) {
    alike_ = alike;
    common_ = random_.integer(0, 8);
  }
  std::int64_t size() {
    const std::int64_t draw = random_.integer(0, 9);
    return draw < 6   ? random_.integer(0, 70)
           : draw < 9 ? random_.integer(100, 3000)
                      : random_.integer(9000, 12000);
  }

 private:
  std::int64_t shift() { return alike_ ? common_ : random_.integer(0, 8); }
  Random random_;
  bool alike_ = true;
  std::int64_t common_ = 0;
};

constexpr DataType dtypes[] = {DataType::float32, DataType::bfloat16, DataType::float16};
/// The number of rounds in every test.
int rounds() {
  static const int count = test::as_on_gpu() ? test::fewer(60) : 16;
  return count;
}

TEST(CpuAndGpu, CastsOfAnyBitsAreEqual) {
  Cases cases(1);
  for (int round = 0; round < rounds(); ++round) {
    for (const DataType from : dtypes) {
      for (const DataType to : dtypes) {
        cases.draw_shifts(round % 2 == 0);
        const std::int64_t n = cases.size();
        expect_equal_bits(
            {cases.patterns(from, n), cases.poisoned(to, n)},
            [](Stream& stream, const auto& v, const Workspace&) { cast(stream, v[0], v[1]); },
            std::string(name_of(from)) + " to " + std::string(name_of(to)));
      }
    }
  }
}

TEST(CpuAndGpu, SumsAreEqual) {
  Cases cases(2);
  for (int round = 0; round < rounds(); ++round) {
    for (const DataType a : dtypes) {
      for (const DataType out : dtypes) {
        cases.draw_shifts(round % 2 == 0);
        const std::int64_t n = cases.size();
        const DataType b = dtypes[cases.random().integer(0, 2)];
        expect_equal_bits(
            {cases.numbers(a, n), cases.numbers(b, n), cases.poisoned(out, n), cases.numbers(out, n),
             cases.poisoned(out, n), cases.poisoned(a, n)},
            [](Stream& stream, const auto& v, const Workspace&) {
              add(stream, v[0], v[1], v[2]);
              accumulate(stream, v[0], v[3]);
              fill_constant(stream, v[4], 0.3f);
              fill_zero(stream, v[5]);
              copy(stream, v[0], v[5]);
            },
            "sums of " + std::string(name_of(a)) + " into " + std::string(name_of(out)));
        const std::int64_t columns = cases.random().integer(1, 200), rows = cases.random().integer(0, 150);
        expect_equal_bits(
            {cases.numbers(a, rows * columns), cases.numbers(b, columns),
             cases.numbers(DataType::float32, columns)},
            [&](Stream& stream, const auto& v, const Workspace& workspace) {
              const TensorView x = v[0].reshaped({rows, columns});
              bias_gradient(stream, x, v[2], workspace);
              add_bias(stream, x, v[1]);
            },
            "rows " + std::to_string(rows) + " x " + std::to_string(columns), 8 * columns);
        const std::int64_t wide = columns + cases.random().integer(0, 9), from = cases.random().integer(0, 9);
        expect_equal_bits(
            {cases.numbers(a, rows * (from + columns)), cases.numbers(a, rows * wide)},
            [&](Stream& stream, const auto& v, const Workspace&) {
              copy_columns(stream, v[0].reshaped({rows, from + columns}), from, v[1].reshaped({rows, wide}),
                           wide - columns, columns);
            },
            "columns of " + std::string(name_of(a)));
      }
    }
  }
}

TEST(CpuAndGpu, OrderedSumsAreEqual) {
  Cases cases(3);
  for (int round = 0; round < 4 * rounds(); ++round) {
    cases.draw_shifts(round % 2 == 0);
    const std::int64_t n = cases.size() % 3000;
    const std::int64_t count = round % 8 == 0 ? cases.random().integer(65, 80) : cases.random().integer(1, 9);
    const DataType piece = dtypes[round % 3], out = dtypes[round / 3 % 3];
    const int group = static_cast<int>(cases.random().integer(-3, 5));
    const int outer = static_cast<int>(cases.random().integer(1, 4));
    std::vector<Operand> operands{cases.numbers(out, n)};
    for (std::int64_t i = 0; i < count; ++i) operands.push_back(cases.numbers(piece, n));
    expect_equal_bits(
        operands,
        [&](Stream& stream, const auto& v, const Workspace&) {
          std::vector<const void*> pieces;
          for (std::size_t i = 1; i < v.size(); ++i) pieces.push_back(v[i].data);
          ordered_sum(stream, pieces, piece, {group, outer}, round % 2 == 1, v[0]);
        },
        std::to_string(count) + " pieces in groups of " + std::to_string(group) + " and " +
            std::to_string(outer));
  }
}

TEST(CpuAndGpu, BlocksAndTheirSumsAreEqual) {
  Cases cases(12);
  for (int round = 0; round < 2 * rounds(); ++round) {
    cases.draw_shifts(true);
    const DataType dtype = dtypes[round % 3], out = dtypes[round / 3 % 3];
    const std::int64_t elements = cases.random().integer(0, 9) * quantized_block;
    const int ranks = static_cast<int>(cases.random().integer(1, 5));
    const int group = static_cast<int>(cases.random().integer(-2, 5));
    const int outer = static_cast<int>(cases.random().integer(1, 3));
    // Numbers, or any bits. The latter include NaNs, which a GPU changes in sums.
    const bool any = round % 4 == 0;
    std::vector<Operand> operands{
        any ? cases.patterns(dtype, ranks * elements) : cases.numbers(dtype, ranks * elements),
        cases.poisoned(DataType::uint8, quantized_bytes(ranks * elements)),
        cases.poisoned(out, ranks * elements), cases.numbers(out, elements)};
    for (Operand& operand : operands) operand.shift_elements = 0;
    expect_equal_bits(
        operands,
        [&](Stream& stream, const auto& v, const Workspace&) {
          quantize(stream, v[0], v[1].data);
          if (any) return;
          dequantize(stream, v[1].data, v[2]);
          quantized_sum(stream, v[1].data, ranks, {group, outer}, round % 2 == 1, v[3]);
        },
        std::to_string(ranks) + " pieces in groups of " + std::to_string(group) + " and " +
            std::to_string(outer));
  }
}

TEST(CpuAndGpu, StatisticsAndDigestsAreEqual) {
  Cases cases(4);
  for (int round = 0; round < 2 * rounds(); ++round) {
    cases.draw_shifts(round % 2 == 0);
    const DataType dtype = dtypes[round % 3];
    const std::int64_t n = round % 4 == 3 ? cases.random().integer(30000, 50000) : cases.size();
    Operand numbers = cases.numbers(dtype, n);
    if (n > 0 && round % 3 == 1) {
      const std::int64_t at = cases.random().integer(0, n - 1);
      const std::uint32_t infinity = dtype == DataType::float32    ? 0x7f800000u
                                     : dtype == DataType::bfloat16 ? 0x7f80u
                                                                   : 0x7c00u;
      std::memcpy(numbers.bytes.data() + at * size_of(dtype), &infinity,
                  static_cast<std::size_t>(size_of(dtype)));
    }
    Operand statistics = cases.poisoned(DataType::int64, sizeof(GradientStatistics) / 8);
    Operand digest{DataType::int64, 2, std::vector<unsigned char>(16, 7)};
    statistics.shift_elements = 0;
    expect_equal_bits(
        {numbers, statistics, digest},
        [&](Stream& stream, const auto& v, const Workspace&) {
          gradient_statistics(stream, v[0], static_cast<GradientStatistics*>(v[1].data));
          add_digest(stream, v[0], 3, 11, static_cast<Digest*>(v[2].data));
        },
        std::to_string(n) + " of " + std::string(name_of(dtype)));
  }
}

TEST(CpuAndGpu, OptimizerUpdatesAreEqual) {
  Cases cases(5);
  for (int round = 0; round < rounds(); ++round) {
    for (const DataType gradient : dtypes) {
      for (const DataType weight : dtypes) {
        cases.draw_shifts(round % 2 == 0);
        const std::int64_t n = cases.size();
        const DataType moment = round % 3 == 0 ? DataType::bfloat16 : DataType::float32;
        AdamArguments adam;
        adam.learning_rate = adam.step_size = 3e-3f;
        adam.weight_decay = 0.1f;
        adam.gradient_scale = 0.37f;
        adam.corrected_epsilon = 4e-9f;
        adam.decoupled = round % 2 == 0;
        SgdArguments sgd{0.01f, 0.9f, 0.3f, 0.05f, round % 2 == 1, round % 4 == 2, 1.7f, true};
        const auto bytes_of = [](const auto& arguments, auto other) {
          other.weight_decay = 0;
          other.gradient_scale *= 2;
          const auto* first = reinterpret_cast<const unsigned char*>(&arguments);
          const auto* second = reinterpret_cast<const unsigned char*>(&other);
          Operand both{DataType::uint8, 2 * sizeof(arguments), {first, first + sizeof(arguments)}};
          both.bytes.insert(both.bytes.end(), second, second + sizeof(other));
          return both;
        };
        // Two alternating groups with padding between, or the whole range in more segments than one launch
        // takes.
        std::vector<UpdateSegment> segments;
        const std::int64_t most = round % 4 == 1 ? 3 : std::max<std::int64_t>(1, n);
        for (std::int64_t at = 0; at < n;) {
          const std::int64_t count = std::min(n - at, cases.random().integer(0, most));
          segments.push_back({at, count, static_cast<int>(segments.size() % 2)});
          at += count + (round % 2 == 0 ? cases.random().integer(0, 9) : 0);
        }
        expect_equal_bits(
            {cases.numbers(gradient, n), cases.numbers(DataType::float32, n), cases.numbers(moment, n),
             cases.numbers(moment, n, true), cases.poisoned(weight, n), bytes_of(adam, adam),
             bytes_of(sgd, sgd)},
            [&](Stream& stream, const auto& v, const Workspace&) {
              const GroupArguments<AdamArguments> adam_groups{
                  reinterpret_cast<const AdamArguments*>(v[5].data), 2};
              const GroupArguments<SgdArguments> sgd_groups{reinterpret_cast<const SgdArguments*>(v[6].data),
                                                            2};
              adam_update(stream, adam_groups, segments, v[0], v[1], v[2], v[3], v[4]);
              adam_update(stream, adam_groups, segments, v[0], v[1], v[2], v[3], {});
              sgd_update(stream, sgd_groups, segments, v[0], v[1], v[2], v[4]);
              sgd_update(stream, sgd_groups, segments, v[0], v[1], {}, {});
            },
            std::to_string(n) + " elements, gradient " + std::string(name_of(gradient)) + ", weight " +
                std::string(name_of(weight)));
      }
    }
  }
}

TEST(CpuAndGpu, DrawsAreEqual) {
  Cases cases(6);
  for (int round = 0; round < 2 * rounds(); ++round) {
    for (const DataType dtype : dtypes) {
      cases.draw_shifts(round % 2 == 0);
      const std::int64_t per_sample =
          round % 2 == 0 ? 8 * cases.random().integer(1, 60) : cases.random().integer(1, 90);
      const std::int64_t count = round == 5 ? 300 : cases.random().integer(1, 5);
      std::vector<std::int64_t> samples(static_cast<std::size_t>(count));
      for (auto& sample : samples) sample = cases.random().integer(0, 1 << 30);
      DropoutOptions options{0.3f, test_seed(), 17, 3, samples};
      const std::int64_t n = per_sample * count, first = cases.random().integer(0, 9);
      // In alternate rounds a part of several samples, which begins within one of them and ends after the
      // last.
      if (round / 2 % 2 == 1) {
        options.sample_elements = cases.random().integer(1, per_sample);
        options.first_element = cases.random().integer(0, options.sample_elements);
      }
      const DataType other = round % 4 == 3 ? dtypes[round % 3] : dtype;
      expect_equal_bits(
          {cases.numbers(dtype, n), cases.poisoned(other, n), cases.poisoned(DataType::float32, per_sample)},
          [&](Stream& stream, const auto& v, const Workspace&) {
            dropout(stream, options, v[0], v[1]);
            fill_uniform(stream, v[2], {test_seed(), RandomPurpose::test, 5}, first, -0.3f, 0.7f);
          },
          std::to_string(count) + " samples of " + std::to_string(per_sample));
    }
  }
}

TEST(CpuAndGpu, DropoutOfSomeColumnsHasEqualBits) {
  Cases cases(29);
  for (int round = 0; round < rounds(); ++round) {
    cases.draw_shifts(round % 2 == 0);
    const std::int64_t count = round == 3 ? 300 : cases.random().integer(1, 4), blocks = 1 + round % 3,
                       of_block = cases.random().integer(1, 70), run = cases.random().integer(1, of_block),
                       rows = count * cases.random().integer(1, 3);
    std::vector<std::int64_t> samples(static_cast<std::size_t>(count));
    for (auto& sample : samples) sample = cases.random().integer(0, 1 << 30);
    DropoutOptions options{0.3f, test_seed(), 17, 3, samples};
    options.row_elements = blocks * of_block;
    options.column_blocks = blocks;
    options.first_column = cases.random().integer(0, of_block - run);
    const Shape shape{rows, blocks * run};
    const DataType dtype = dtypes[round % 3], other = dtypes[round / 3 % 3];
    expect_equal_bits(
        {cases.numbers(dtype, shape.elements()), cases.poisoned(other, shape.elements())},
        [&](Stream& stream, const auto& v, const Workspace&) {
          dropout(stream, options, v[0].reshaped(shape), v[1].reshaped(shape));
        },
        std::to_string(run) + " of " + std::to_string(of_block) + " columns in blocks");
  }
}

/// fp64 logarithm, sine and cosine differ between libraries in their last bit. So the resulting fp32 number
/// may differ by one unit in its last place, to which the following multiplication and addition apply.
TEST(CpuAndGpu, NormalNumbersAreWithinOneUnit) {
  Cases cases(7);
  for (int round = 0; round < rounds(); ++round) {
    cases.draw_shifts(round % 2 == 0);
    const std::int64_t n = cases.random().integer(0, 1000), first = cases.random().integer(0, 9);
    const auto call = [&](Stream& stream, const auto& v, const Workspace&) {
      fill_normal(stream, v[0], {test_seed(), RandomPurpose::test, 5}, first, 0.0f, 1.0f);
    };
    const std::vector<Operand> operands{cases.poisoned(DataType::float32, n)};
    const auto wanted = outcome(DeviceKind::cpu, operands, call, 256)[0];
    const auto got = outcome(DeviceKind::cuda, operands, call, 256)[0];
    for (std::size_t i = 0; i < wanted.size(); i += 4) {
      std::int32_t a, b;
      std::memcpy(&a, wanted.data() + i, 4);
      std::memcpy(&b, got.data() + i, 4);
      ASSERT_LE(std::abs(std::int64_t{a} - b), 1) << i / 4 << "; " << repeat_line();
    }
  }
}

TEST(CpuAndGpu, RotationsAreEqual) {
  Cases cases(9);
  for (int round = 0; round < 2 * rounds(); ++round) {
    cases.draw_shifts(round % 2 == 0);
    const DataType dtype = dtypes[round % 3];
    const std::int64_t half =
        round % 2 == 0 ? 8 * cases.random().integer(1, 9) : cases.random().integer(1, 40);
    const std::int64_t head_dim = 2 * half + (round % 4 < 2 ? 0 : cases.random().integer(0, 9));
    const std::int64_t rows = cases.random().integer(0, 40), heads = cases.random().integer(1, 9);
    expect_equal_bits(
        {cases.numbers(dtype, rows * heads * head_dim), cases.numbers(DataType::float32, rows * 2 * half)},
        [&](Stream& stream, const auto& v, const Workspace&) {
          rope(stream, round % 3 == 1, v[1].reshaped({rows, 2 * half}), heads, head_dim, v[0]);
        },
        std::to_string(rows) + " rows of " + std::to_string(heads) + " heads of " + std::to_string(head_dim));
  }
}

TEST(CpuAndGpu, EmbeddingAndSquaredErrorAreEqual) {
  Cases cases(8);
  for (int round = 0; round < 2 * rounds(); ++round) {
    cases.draw_shifts(round % 2 == 0);
    const DataType dtype = dtypes[round % 3];
    // Occasionally there are more tokens of one id than a block's list can hold, so that the list is
    // processed in parts.
    const bool crowded = round % 16 == 5;
    const std::int64_t batch = cases.random().integer(crowded ? 5 : 1, 6);
    const std::int64_t time = crowded ? 1000 : cases.random().integer(1, 120);
    const std::int64_t width = crowded          ? 6
                               : round % 2 == 0 ? 8 * cases.random().integer(1, 20)
                                                : cases.random().integer(1, 90);
    const std::int64_t vocabulary = crowded ? 2 : round % 3 == 0 ? 3 : 500, rows = batch * time;
    Operand tokens = cases.poisoned(DataType::int32, rows);
    for (std::int64_t i = 0; i < rows; ++i) {
      const auto token = static_cast<std::int32_t>(cases.random().integer(0, vocabulary - 1));
      std::memcpy(tokens.bytes.data() + i * 4, &token, 4);
    }
    Operand totals{DataType::int64, 2, std::vector<unsigned char>(16, 0)};
    expect_equal_bits(
        {tokens, cases.numbers(dtype, vocabulary * width), cases.numbers(dtype, time * width),
         cases.poisoned(dtype, rows * width), cases.numbers(DataType::float32, vocabulary * width),
         cases.numbers(DataType::float32, time * width), cases.numbers(DataType::float32, rows),
         cases.numbers(DataType::float32, rows), totals},
        [&](Stream& stream, const auto& v, const Workspace&) {
          const TensorView ids = v[0].reshaped({batch, time});
          const bool positions = round % 4 != 3;
          // In alternate rounds the rows of a part of the vocabulary.
          const std::int64_t first = round / 2 % 2 == 1 ? vocabulary / 3 : whole_vocabulary;
          const std::int64_t held = first < 0 ? vocabulary : divide_round_up(vocabulary, std::int64_t{2});
          const auto table = [&](const TensorView& whole) {
            return whole.slice(0, held * width).reshaped({held, width});
          };
          embedding_forward(stream, ids, table(v[1]), positions ? v[2].reshaped({time, width}) : TensorView{},
                            v[3], {}, first);
          embedding_backward(stream, ids, v[3], table(v[4]),
                             positions ? v[5].reshaped({time, width}) : TensorView{}, first);
          const TensorView y = v[6].reshaped({batch, time}), target = v[7].reshaped({batch, time});
          auto* sums = static_cast<char*>(v[8].data);
          squared_error(stream, y, target, {sums, DataType::float64, {}}, {sums + 8, DataType::int64, {}});
          squared_error_gradient(stream, y, target, 0.3f, y);
        },
        std::to_string(batch) + " x " + std::to_string(time) + " tokens of " + std::to_string(vocabulary));
  }
}

}  // namespace
}  // namespace tranche::kernels::testing
