#pragma once
/// Reads and writes whole tensors by name, from all shards; digests. Private to engine/.

#include <cstddef>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "engine/state_store.h"
#include "tranche/kernels/reduction.h"
#include "tranche/kernels/workspace.h"
#include "tranche/partition/mesh.h"

namespace tranche::detail {

float load_as_float(const std::byte* raw, std::int64_t index, DataType dtype);
void store_from_float(std::byte* raw, std::int64_t index, DataType dtype, float value);

/// All calls except write_main_gradient() are collective over the group and the replicas of the tensor's
/// buffer, over the axis `tensor` and over the pipeline's stages; digest() is collective over `ranks`. They
/// wait for the work that they need and are done on return.
class TensorAccess {
 public:
  /// All arguments must outlive it; nothing else may use the workspace during a call. `pipeline`: the stages
  /// of this rank's data rank; null if there is one stage. `tensor_ranks`: the ranks of the axis `tensor`;
  /// null if it has size 1.
  TensorAccess(StateStore& store, const Config& config, Communicator& ranks, const Mesh& mesh, Device& device,
               MemoryResource& memory, kernels::Workspace workspace, Communicator* pipeline = nullptr,
               Communicator* tensor_ranks = nullptr);

  /// The tensor in fp32: master weights, or a frozen tensor's compute-dtype values.
  std::vector<float> weight(int tensor);
  /// Sets this rank's part of the weights, both master and compute dtype.
  void write_weight(int tensor, std::span<const float> values);
  /// Optimizer state number `which` of a trainable tensor.
  std::vector<float> state(int tensor, int which);
  void write_state(int tensor, int which, std::span<const float> values);
  /// The number of a trainable tensor's state; throws InvalidArgument listing the states.
  int find_state(int tensor, std::string_view optimizer, std::string_view state) const;

  /// The main gradient, unscaled. `reduced` false: only the local accumulator holds gradients, and a copy of
  /// it is reduced, with GradientReducer's `reduction_group`.
  std::vector<float> main_gradient(int tensor, bool reduced, int reduction_group);
  /// Sets this rank's part of the main gradient; `raw` is the whole tensor in the accumulation dtype.
  void write_main_gradient(int tensor, std::span<const std::byte> raw);
  /// Computes the statistics again for a main gradient that was written after it had left the device.
  void take_statistics(FlatBuffer& flat, kernels::GradientStatistics* statistics);

  enum class Digested : std::uint8_t { weights, weights_and_state, frozen_weights };
  /// The digest over all ranks; optimizer state has higher indices than weights. Throws CommunicationError on
  /// all ranks when copies differ, naming the first rank with a different copy.
  kernels::Digest digest(Digested what);

 private:
  using Read = std::function<void(ElementRange, void*)>;
  /// Assembles a whole tensor on every rank. `read` fills host memory with elements, in `dtype`, of the flat
  /// buffer within `local_range`: the whole buffer, this rank's shard, or its owned range. Each element is
  /// then sent by the rank whose range contains it.
  std::vector<float> gather(int tensor, DataType dtype, ElementRange local_range, const Read& read);
  /// Assembles a tensor that the axis `tensor` cuts from the part of each rank.
  std::vector<float> whole_of_parts(int tensor, const std::vector<float>& local);
  /// This rank's part of a whole tensor with `items` values of type T for each element.
  template <typename T>
  static std::vector<T> part_of_whole(const TensorState& tensor, std::span<const T> whole,
                                      std::int64_t items = 1);
  /// Broadcasts a tensor from the first stage that holds it to the others.
  std::vector<float> to_all_stages(int tensor, std::vector<float> values);
  /// Optimizer state, or for `which` -1 the master weight.
  std::vector<float> gather_state(int tensor, int which);
  void write_slices(int tensor, int which, std::span<const float> values);
  const TensorState& tensor_at(int index) const { return store_.tensors()[static_cast<std::size_t>(index)]; }

  StateStore& store_;
  const Config& config_;
  Communicator& ranks_;
  const Mesh& mesh_;
  Device& device_;
  Stream& compute_;
  MemoryResource& memory_;
  kernels::Workspace workspace_;
  Communicator* pipeline_;
  Communicator* tensor_ranks_;
};

}  // namespace tranche::detail
