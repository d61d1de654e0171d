#pragma once
/// The optimizer's calls for ranges of flat buffers, and the numbers and sums that they read. Private to
/// engine/.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/flat_buffer.h"
#include "engine/shard_slice.h"
#include "tranche/comm/communicator.h"
#include "tranche/device/device.h"
#include "tranche/device/memory.h"
#include "tranche/optim/optimizer.h"

namespace tranche::detail {

class FlatUpdater {
 public:
  /// For all tensors of the model, frozen ones too; their names stay where they are. `precision` and `seed`:
  /// of the configuration. Throws ConfigurationError for a rule that asks for what engines do not do, or does
  /// not do what `precision` asks. Optimizer and tensors outlive it.
  FlatUpdater(const Optimizer& optimizer, std::span<const TensorState> tensors,
              const PrecisionConfig& precision, std::uint64_t seed);

  bool has_sums() const { return sum_count_ > 0; }
  /// The facts of a tensor, by its number in the engine.
  const TrainableTensor& facts(int tensor) const { return tensors_[static_cast<std::size_t>(tensor)].facts; }
  /// Updates are the same work in every step: what changes lies in device memory.
  bool replayable() const { return stride_ > 0; }

  /// Takes device memory for numbers and sums. `whole`: a rank keeps more than its own share of the optimizer
  /// state.
  void allocate(MemoryResource& memory, bool whole);
  /// Sends the numbers of a step to where updates read them: on the device behind what `compute` was given so
  /// far, in host memory behind what `host` was given. No offloaded state: `host` is null.
  void send_numbers(Device& device, Stream& compute, Stream* host, const OptimizerStep& step);

  /// Before the step's prepare().
  void clear_sums(Stream& compute, Stream* host);
  /// Optimizer::prepare() on the slice's stream for what a rank keeps of a flat buffer, or a part of that, of
  /// which counts what it owns.
  void prepare(const OptimizerStep& step, const FlatBuffer& flat, const ShardSlice& slice);
  /// Optimizer::prepare() of a part of one tensor that is computed as a whole matrix.
  void prepare(const OptimizerStep& step, const FlatBuffer& flat, const ShardSlice& piece,
               const TensorView& message, const TensorView& scratch);
  /// Adds up the sums of all ranks, rounds each once and sends them to where apply() reads them.
  void exchange_sums(Device& device, Stream& compute, Stream* host, Communicator& all_ranks);

  /// Optimizer::apply() on the slice's stream. `fresh_weights`: the memory of the weights held something else
  /// before, so padding is set to zero. `message`: of a part of one tensor that was computed as a whole
  /// matrix.
  void apply(const OptimizerStep& step, const FlatBuffer& flat, const ShardSlice& slice,
             bool fresh_weights = false, const TensorView& message = {});

 private:
  struct Tensor {
    TrainableTensor facts;
    std::uint64_t index = 0;  ///< in the model
    int group = 0;
    std::int64_t first_sum = -1;  ///< -1: no sums
  };
  void add_segments(const FlatBuffer& flat, ElementRange range, std::int64_t first, const double* sums,
                    SquareSum* partial, std::vector<TensorSegment>& segments) const;
  std::int64_t numbers_bytes() const;
  UpdateRange range_of(const ShardSlice& slice, std::span<const TensorSegment> segments) const;
  double* sums_of(const ShardSlice& slice);
  SquareSum* partial_of(const ShardSlice& slice);

  const Optimizer& optimizer_;
  std::span<const TensorState> all_tensors_;
  std::vector<Tensor> tensors_;
  std::vector<GroupOptions> groups_;
  std::optional<std::uint64_t> rounding_seed_;  ///< of stochastic rounding
  std::size_t number_bytes_ = 0;
  std::int64_t stride_ = 0;
  std::int64_t sum_count_ = 0, partial_count_ = 0;
  Buffer numbers_;  ///< of each group, then the key of stochastic rounding
  Buffer sums_;     ///< of all ranks, rounded, then what this rank's prepare() adds to
  /// For offloaded state. Written by work of the host stream, which owns them with the updater.
  std::shared_ptr<std::vector<std::byte>> host_numbers_;
  struct HostSums {
    std::vector<double> sums;
    std::vector<SquareSum> partial;
  };
  std::shared_ptr<HostSums> host_sums_;
};

}  // namespace tranche::detail
