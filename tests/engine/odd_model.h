#pragma once
/// A model made of special cases, for tests of the engine's invariants: a unit used twice a pass (tied),
/// prime sizes, a unit with fewer elements than ranks (some ranks own nothing), and a unit with a frozen
/// tensor. Its loss is half the squared distance of every weight to targets drawn per (tensor, sample,
/// element), so its gradients are known in closed form.

#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tranche/comm/backends.h"
#include "tranche/engine/engine.h"

namespace tranche::test {

/// The units are tied (2 uses), prime, tiny and mixed (contains odd_frozen_tensor); with `single_unit` only
/// the first. With `large` they are the first and one with tensors whose states block8 keeps in blocks, none
/// of which has a whole number of blocks.
ModelSpec odd_model(bool single_unit = false, bool large = false);
inline constexpr const char* odd_frozen_tensor = "mixed.frozen";

/// The gradient of one sample for element i of a tensor is weight - odd_target(...). The target is uniform in
/// [-0.5, 0.5), from the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). It is inline and cheap,
/// because the tests draw some hundred million of them, under sanitizers too.
inline float odd_target(std::uint64_t tensor, std::int64_t sample, std::int64_t element) {
  std::uint64_t x = (tensor << 44) + (static_cast<std::uint64_t>(sample) << 12) +
                    static_cast<std::uint64_t>(element) + 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return static_cast<float>((x ^ (x >> 31)) >> 40) * 0x1p-24f - 0.5f;
}

/// Runs one micro-batch with samples first_sample ... first_sample + count - 1. The gradient of element 2 of
/// `poison_tensor` is infinite; `reversed` visits the units in reverse order.
void odd_micro_batch(Engine& engine, std::int64_t first_sample, std::int64_t count,
                     const std::string& poison_tensor = {}, bool reversed = false);

/// The steps of one micro-batch, for tests that interleave several. All calls act on the engine's current
/// micro-batch, which must be this one.
class OddMicroBatch {
 public:
  /// The engine must have begun the micro-batch.
  OddMicroBatch(Engine& engine, std::int64_t first_sample, std::int64_t count);
  void forward(int unit);
  /// `share`: the fraction of the gradient; each of the tied unit's two uses has a half. `bad_tensor` acts as
  /// poison_tensor above.
  void backward(int unit, float share, const std::string& bad_tensor = {});
  void end();

 private:
  Engine& engine_;
  std::int64_t first_, count_;
  StepBuffer scalars_;
  TensorView loss_, tokens_;
};

/// The settings of one run of the odd model.
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
  std::int64_t persistent = 0;  ///< largest tensor that stage 3 keeps whole
  std::int64_t persistent_in_all = std::numeric_limits<std::int64_t>::max();
  std::int64_t prefetch = 50'000'000;
  bool poison = false;
  bool plan_memory = true;
  bool frozen = true;
  std::string also_frozen = {};  ///< a second pattern
  bool single_unit = false;
  bool large = false;
  int steps = 4;
  double clipping = 1.0;
  DataType accumulation_dtype = DataType::float32;
  bool quantized_gradients = false, quantized_weights = false;
  std::optional<DataType> communication = {};  ///< nullopt: dtype
  std::int64_t samples_per_micro_batch = 3;
  /// Micro-batches of a step with tranche.world_size_invariant, in which case `accumulation` has no effect;
  /// 0: off. Ranks without samples compute values that are not finite.
  std::int64_t micro_batches = 0;
  FaultInjection faults;
  int ranks_per_host = 0;  ///< declared ranks of a node; 0: all on one
  std::string mesh = {};
  Replicate replicate = Replicate::all;
  ReplicaSum replica_sum = ReplicaSum::micro_batch;
  UpdateTime update = UpdateTime::at_the_boundary;
  bool whole_samples = false;  ///< every rank's micro-batches learn from all tokens
  std::string collectives = "auto";
  std::string device_transport = "auto";  ///< transport between GPUs
  DeviceKind device = DeviceKind::cpu;
  OffloadConfig offload;
  double link_bytes_per_second = 0;
  /// Called on each rank with its engine after the last step.
  std::function<void(Engine&, int rank)> at_end = {};
  std::string to_string() const;
};

/// The results of a run; vectors per rank are indexed by rank.
struct OddResult {
  explicit OddResult(int ranks);
  kernels::Digest weights, state;
  std::vector<StepResult> steps;
  std::vector<TierAccount> accounts;  ///< accounts of the device
  std::vector<TierAccount> host_accounts, nvme_accounts;
  std::vector<Engine::StateBytes> state_bytes;
  std::vector<std::int64_t> wire_elements, formula_elements;
  std::vector<std::int64_t> wire_bytes, formula_bytes;
  std::vector<std::int64_t> memory_calls_per_late_step;
};

/// Changes setting number `which`, one of those that must not change any bit.
inline constexpr int settings_without_effect = 12;
void apply_setting_without_effect(OddRun& run, int which);

Config odd_config(const OddRun& run);
/// Runs one rank; the ranks of a process share `result`, which `mutex` guards.
void train_odd_rank(const OddRun& run, int rank, const CommunicatorFactory& factory, OddResult& result,
                    std::mutex& mutex);
/// Trains on thread ranks (on meta only as rank 0 of as many) and collects the results.
OddResult train_odd(const OddRun& run);

}  // namespace tranche::test
