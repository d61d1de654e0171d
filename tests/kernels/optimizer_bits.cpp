// Prints the results of the host optimizers as one digest per case; they must be equal on every instruction
// set and machine. It is a separate program, so that scripts/check_neon.sh can run it on an emulated 64-bit
// ARM processor.

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "tests/kernels/cpu_updates.h"

namespace {

using namespace tranche;
using namespace tranche::kernels;

/// SplitMix64 (Steele, Lea and Flood, 2014), which gives the same numbers on every machine.
class Random {
 public:
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  /// Mostly ordinary values, sometimes tiny, subnormal, zero or large ones.
  float value() {
    const std::uint64_t bits = next();
    const float unit = static_cast<float>(static_cast<std::int32_t>(bits >> 40)) * 0x1p-23f - 1.0f;
    switch (bits % 16) {
      case 0:
        return 0.0f;
      case 1:
        return unit * 0x1p-130f;
      case 2:
        return unit * 0x1p-30f;
      case 3:
        return unit * 0x1p12f;
      default:
        return unit;
    }
  }

 private:
  std::uint64_t state_ = 1;
};

class Values {
 public:
  Values(DataType dtype, std::int64_t n, Random& random, bool positive = false)
      : dtype_(dtype), n_(n), bytes_(static_cast<std::size_t>(n * size_of(dtype))) {
    for (std::int64_t i = 0; i < n; ++i) {
      const float drawn = random.value(), value = positive ? std::abs(drawn) : drawn;
      auto* at = bytes_.data() + i * size_of(dtype);
      const auto half = [&] {
        return dtype == DataType::bfloat16 ? to_bfloat16(value).bits : to_float16(value).bits;
      };
      if (dtype == DataType::float32) {
        std::memcpy(at, &value, sizeof(value));
      } else {
        const std::uint16_t bits = half();
        std::memcpy(at, &bits, sizeof(bits));
      }
    }
  }
  TensorView view() { return {bytes_.data(), dtype_, Shape{n_}}; }
  /// FNV-1a of the bytes.
  std::uint64_t digest(std::uint64_t from) const {
    for (const unsigned char byte : bytes_) from = (from ^ byte) * 0x100000001b3u;
    return from;
  }

 private:
  DataType dtype_;
  std::int64_t n_;
  std::vector<unsigned char> bytes_;
};

std::uint64_t digest(const char* rule, DataType gradient_type, DataType moment_type, DataType weight_type,
                     std::int64_t n, bool variant, const cpu::UpdateTuning& tuning) {
  Random random;
  Values gradient(gradient_type, n, random), master(DataType::float32, n, random);
  Values first(moment_type, n, random), second(moment_type, n, random, true), weight(weight_type, n, random);
  const UpdateSegment segments[] = {{0, n / 3, 0}, {n / 3, n - n / 3, 1}};
  if (rule[0] == 'a') {
    AdamArguments a;
    a.learning_rate = 3e-4f;
    a.step_size = 1.1e-3f;
    a.corrected_epsilon = 5.47e-10f;
    a.gradient_scale = 0.37f;
    a.decoupled = variant;
    AdamArguments decays = a;
    decays.weight_decay = 0.1f;
    const AdamArguments groups[] = {decays, a};
    cpu::adam_update(1, {groups, 2}, segments, gradient.view(), master.view(), first.view(), second.view(),
                     weight.view(), tuning);
  } else {
    SgdArguments s;
    s.learning_rate = 0.01f;
    s.momentum = 0.9f;
    s.dampening = 0.1f;
    s.nesterov = variant;
    s.gradient_scale = 0.37f;
    SgdArguments decays = s;
    decays.weight_decay = 0.1f;
    const SgdArguments groups[] = {decays, s};
    cpu::sgd_update(1, {groups, 2}, segments, gradient.view(), master.view(), first.view(), weight.view(),
                    tuning);
  }
  return weight.digest(second.digest(first.digest(master.digest(0xcbf29ce484222325u))));
}

/// Prints one line, and another if tuning by processor changes a bit.
void run(const char* rule, DataType gradient_type, DataType moment_type, DataType weight_type, std::int64_t n,
         bool variant) {
  const std::uint64_t own =
      digest(rule, gradient_type, moment_type, weight_type, n, variant, cpu::update_tuning());
  std::printf("%s variant %d gradient %d moments %d weight %d elements %lld: %016llx\n", rule,
              variant ? 1 : 0, static_cast<int>(gradient_type), static_cast<int>(moment_type),
              static_cast<int>(weight_type), static_cast<long long>(n), static_cast<unsigned long long>(own));
  for (const std::int64_t ahead : {64, 1024}) {
    if (digest(rule, gradient_type, moment_type, weight_type, n, variant, {ahead}) != own) {
      std::printf("other bits with %lld bytes of prefetch\n", static_cast<long long>(ahead));
    }
  }
}

}  // namespace

int main() {
  constexpr DataType fp32 = DataType::float32, bf16 = DataType::bfloat16, fp16 = DataType::float16;
  for (const std::int64_t n : {std::int64_t{1}, std::int64_t{31}, std::int64_t{1009}, std::int64_t{20011}}) {
    for (const bool variant : {false, true}) {
      for (const DataType gradient : {fp32, bf16, fp16}) {
        for (const DataType weight : {bf16, fp16}) {
          for (const DataType moment : {fp32, bf16}) run("adam", gradient, moment, weight, n, variant);
          run("sgd", gradient, fp32, weight, n, variant);
        }
      }
    }
  }
}
