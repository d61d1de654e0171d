#pragma once
/// A model of nothing but odd cases, for the laws of the engine: a unit used twice a pass (tied), prime
/// sizes, a unit smaller than the number of ranks (ranks that own nothing), a unit with a frozen tensor. Its
/// loss is half the squared distance of every weight to targets drawn per (tensor, sample, element), so its
/// gradients are known in closed form.

#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tranche/comm/backends.h"
#include "tranche/engine/engine.h"

namespace tranche::test {

/// The units: tied (2 uses), prime, tiny, mixed (holds odd_frozen_tensor); or the first alone. `large`: the
/// first and one with tensors whose states block8 keeps in blocks, none of them of whole blocks.
ModelSpec odd_model(bool single_unit = false, bool large = false);
inline constexpr const char* odd_frozen_tensor = "mixed.frozen";

/// The gradient of one sample with respect to element i of a tensor is weight - odd_target(...): uniform in
/// [-0.5, 0.5) by the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). Inline and cheap, as the
/// laws draw some hundred million of them, under sanitizers too.
inline float odd_target(std::uint64_t tensor, std::int64_t sample, std::int64_t element) {
  std::uint64_t x = (tensor << 44) + (static_cast<std::uint64_t>(sample) << 12) +
                    static_cast<std::uint64_t>(element) + 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return static_cast<float>((x ^ (x >> 31)) >> 40) * 0x1p-24f - 0.5f;
}

/// One micro-batch: samples first_sample ... first_sample + count - 1; `poison_tensor` makes the gradient of
/// that tensor's element 2 infinite; `reversed` visits the units the other way round.
void odd_micro_batch(Engine& engine, std::int64_t first_sample, std::int64_t count,
                     const std::string& poison_tensor = {}, bool reversed = false);

/// The parts of one, for tests that interleave several. All calls act on the engine's current micro-batch,
/// which has to be this one.
class OddMicroBatch {
 public:
  /// The engine has begun it.
  OddMicroBatch(Engine& engine, std::int64_t first_sample, std::int64_t count);
  void forward(int unit);
  /// `share` of the gradient: the tied unit's two uses have a half each. `bad_tensor` as poison_tensor above.
  void backward(int unit, float share, const std::string& bad_tensor = {});
  void end();

 private:
  Engine& engine_;
  std::int64_t first_, count_;
  StepBuffer scalars_;
  TensorView loss_, tokens_;
};

/// How one run of the odd model is set up.
struct OddRun {
  int ranks = 1;
  int stage = 0;
  std::int64_t accumulation = 1;
  DataType dtype = DataType::float32;
  ReductionPolicy policy = ReductionPolicy::automatic;
  int reduction_group = 0;
  std::string optimizer = "AdamW";
  RuleParameters parameters = {};
  DataType moments = DataType::float32;
  MasterFormat master = MasterFormat::fp32;
  bool stochastic_rounding = false;
  bool overlap = true;
  std::int64_t reduce_bucket = 500'000'000;
  std::int64_t gather_bucket = 500'000'000;
  int depth = 2;
  GatherFor gather_for = GatherFor::use;
  std::int64_t persistent = 0;  ///< largest tensor of what stage 3 keeps whole
  std::int64_t persistent_in_all = std::numeric_limits<std::int64_t>::max();
  std::int64_t prefetch = 50'000'000;
  bool poison = false;
  bool plan_memory = true;
  bool frozen = true;
  std::string also_frozen = {};  ///< another pattern
  bool single_unit = false;
  bool large = false;
  int steps = 4;
  double clipping = 1.0;
  DataType accumulation_dtype = DataType::float32;
  bool quantized_gradients = false, quantized_weights = false;
  std::optional<DataType> communication = {};  ///< none: dtype
  std::int64_t samples_per_micro_batch = 3;
  /// tranche.world_size_invariant with so many micro-batches a step, `accumulation` being without effect;
  /// 0: off. What a rank without samples computes is not finite.
  std::int64_t micro_batches = 0;
  FaultInjection faults;
  int ranks_per_host = 0;  ///< declared; 0: all on one
  std::string mesh = {};
  Replicate replicate = Replicate::all;
  ReplicaSum replica_sum = ReplicaSum::micro_batch;
  UpdateTime update = UpdateTime::at_the_boundary;
  bool whole_samples = false;  ///< every rank's micro-batches learn from all tokens
  std::string collectives = "auto";
  std::string device_transport = "auto";  ///< of GPUs
  DeviceKind device = DeviceKind::cpu;
  OffloadConfig offload;
  double link_bytes_per_second = 0;
  /// Called on each rank with its engine, behind the last step.
  std::function<void(Engine&, int rank)> at_end = {};
  std::string to_string() const;
};

/// The results of one run; per-rank vectors are indexed by rank.
struct OddResult {
  explicit OddResult(int ranks);
  kernels::Digest weights, state;
  std::vector<StepResult> steps;
  std::vector<TierAccount> accounts;  ///< of the device
  std::vector<TierAccount> host_accounts, nvme_accounts;
  std::vector<Engine::StateBytes> state_bytes;
  std::vector<std::int64_t> wire_elements, formula_elements;
  std::vector<std::int64_t> wire_bytes, formula_bytes;
  std::vector<std::int64_t> memory_calls_per_late_step;
};

/// Changes one setting that must not change a bit: `which` counts them.
inline constexpr int settings_without_effect = 12;
void apply_setting_without_effect(OddRun& run, int which);

Config odd_config(const OddRun& run);
/// One rank's part of a run; `result` is shared by the ranks of a process, guarded by `mutex`.
void train_odd_rank(const OddRun& run, int rank, const CommunicatorFactory& factory, OddResult& result,
                    std::mutex& mutex);
/// Trains in thread ranks (or, on meta, as rank 0 of as many) and collects.
OddResult train_odd(const OddRun& run);

}  // namespace tranche::test
