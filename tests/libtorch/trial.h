#pragma once
/// A run of one of the networks: its configuration, and the samples of each rank.

#include <tranche/libtorch.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tranche::test {

namespace lt = libtorch;

struct Trial {
  int stage = 0;
  bool recompute = false;
  int depth = 2;
  std::string optimizer = R"("AdamW", "params": {"lr": 0.001, "weight_decay": 0.01})";
  std::string precision = {};  ///< "bf16" ...
  std::string zero = {};       ///< further keys of zero_optimization, each preceded by a comma
  std::string tranche = {};    ///< further keys of tranche
  double clipping = 0;
  int accumulation = 2;
  bool poison = true;
  std::string reduction = "micro_batch";
  int invariant = 0;     ///< micro-batches of a step of all ranks, distributed by
                         ///< tranche.world_size_invariant
  std::string top = {};  ///< further keys, each preceded by a comma
  std::vector<lt::MatrixNames> matrices = {};

  /// The micro-batches of a step on all ranks together.
  std::int64_t micro_batches(int ranks) const { return invariant > 0 ? invariant : accumulation * ranks; }
  std::string json() const {
    return R"({"train_micro_batch_size_per_gpu": 2, )" +
           (invariant > 0 ? "\"train_batch_size\": " + std::to_string(2 * invariant)
                          : "\"gradient_accumulation_steps\": " + std::to_string(accumulation)) +
           top + R"(, "gradient_clipping": )" + std::to_string(clipping) + R"(, "optimizer": {"type": )" +
           optimizer + "}" + (precision.empty() ? "" : ", \"" + precision + "\": {\"enabled\": true}") +
           R"(, "zero_optimization": {"stage": )" + std::to_string(stage) + zero +
           R"(}, "tranche": {"reduction": ")" + reduction +
           R"(", "communication_timeout": 30, "threads": 1, "depth": )" + std::to_string(depth) + tranche +
           (invariant > 0 ? R"(, "world_size_invariant": true)" : "") + R"(, "debug": {"poison_memory": )" +
           (poison ? "true" : "false") + "}}}";
  }
};

/// The first sample of a rank's micro-batch, if each has two samples.
inline std::int64_t first_sample(std::int64_t step, int micro_batch, const Trial& run, int rank, int ranks) {
  return 2 * (step * run.micro_batches(ranks) + micro_batch * ranks + rank);
}

}  // namespace tranche::test
