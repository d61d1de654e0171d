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
  /// `tensors`: all of the model, frozen ones too. `precision` and `seed` are those of the configuration.
  /// Throws ConfigurationError if the engine does not support what the rule needs, or the rule does not
  /// support `precision`. Optimizer and tensors must outlive it, and the tensors' names stay in place.
  FlatUpdater(const Optimizer& optimizer, std::span<const TensorState> tensors,
              const PrecisionConfig& precision, std::uint64_t seed);

  bool has_sums() const { return sum_count_ > 0; }
  /// The facts of a tensor, by its number in the engine.
  const TrainableTensor& facts(int tensor) const { return tensors_[static_cast<std::size_t>(tensor)].facts; }
  /// True when updates are the same work in every step, because the numbers that change are in device memory.
  bool replayable() const { return stride_ > 0; }

  /// Allocates device memory for numbers and sums. `whole`: a rank keeps more than its own share of the
  /// optimizer state.
  void allocate(MemoryResource& memory, bool whole);
  /// Copies the numbers of a step to where updates read them: to device memory on `compute`, and to host
  /// memory on `host`, which is null without offloaded state.
  void send_numbers(Device& device, Stream& compute, Stream* host, const OptimizerStep& step);

  /// Sets this rank's sums to zero, before the step's prepare().
  void clear_sums(Stream& compute, Stream* host);
  /// Issues Optimizer::prepare() to the slice's stream, for a slice of what this rank keeps of a flat buffer.
  /// Only the elements that it owns count.
  void prepare(const OptimizerStep& step, const FlatBuffer& flat, const ShardSlice& slice);
  /// The same for a part of one tensor that is computed as a whole matrix.
  void prepare(const OptimizerStep& step, const FlatBuffer& flat, const ShardSlice& piece,
               const TensorView& message, const TensorView& scratch);
  /// Adds up the sums of all ranks, rounds each once and sends them to where apply() reads them.
  void exchange_sums(Device& device, Stream& compute, Stream* host, Communicator& all_ranks);

  /// Issues Optimizer::apply() to the slice's stream. `fresh_weights`: the memory of the weights held
  /// something else before, so padding is set to zero. `message`: the result for a part of one tensor that
  /// was computed as a whole matrix.
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
  Buffer sums_;     ///< the rounded sums of all ranks, then those to which this rank's prepare() adds
  /// For offloaded state. Work on the host stream writes them, and shares their ownership.
  std::shared_ptr<std::vector<std::byte>> host_numbers_;
  struct HostSums {
    std::vector<double> sums;
    std::vector<SquareSum> partial;
  };
  std::shared_ptr<HostSums> host_sums_;
};

}  // namespace tranche::detail
