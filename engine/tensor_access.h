#pragma once
/// Tensors by name, in full, from whatever shards hold them; digests. Private to engine/.

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

/// All calls but write_main_gradient() are collective over the group and the replicas of the tensor's buffer
/// over the axis `tensor` and over the stages of a pipeline, digest() over `ranks`; they wait for the work
/// that they need and are done on return.
class TensorAccess {
 public:
  /// All arguments outlive it; nothing else uses the workspace during a call.
  /// `pipeline`: the stages of this rank's data rank; null: there is one. `tensor_ranks`: the ranks of the
  /// axis `tensor`; null: none.
  TensorAccess(StateStore& store, const Config& config, Communicator& ranks, const Mesh& mesh, Device& device,
               MemoryResource& memory, kernels::Workspace workspace, Communicator* pipeline = nullptr,
               Communicator* tensor_ranks = nullptr);

  /// The tensor in fp32: master weights, or the compute-dtype values of a frozen one.
  std::vector<float> weight(int tensor);
  /// Sets this rank's part of the weights: master and compute dtype.
  void write_weight(int tensor, std::span<const float> values);
  /// Optimizer state of a trainable tensor, by its number.
  std::vector<float> state(int tensor, int which);
  void write_state(int tensor, int which, std::span<const float> values);
  /// The number of a trainable tensor's state; throws InvalidArgument naming those there are.
  int find_state(int tensor, std::string_view optimizer, std::string_view state) const;

  /// The main gradient, unscaled. `reduced` false: only the local accumulator holds any, of which a copy is
  /// reduced, with `reduction_group` as GradientReducer's.
  std::vector<float> main_gradient(int tensor, bool reduced, int reduction_group);
  /// Sets this rank's part; `raw` is the whole tensor in the accumulation dtype.
  void write_main_gradient(int tensor, std::span<const std::byte> raw);
  /// Takes the statistics again of a main gradient that was written after it had left the device.
  void take_statistics(FlatBuffer& flat, kernels::GradientStatistics* statistics);

  enum class Digested : std::uint8_t { weights, weights_and_state, frozen_weights };
  /// Over all ranks; optimizer state comes under indices behind the weights'. Throws CommunicationError on
  /// all ranks when copies differ, naming the first rank that holds another.
  kernels::Digest digest(Digested what);

 private:
  using Read = std::function<void(ElementRange, void*)>;
  /// Assembles a whole tensor on every rank. `read` fills host memory with elements, in `dtype`, of the flat
  /// buffer in `local_range`: all of them on all ranks, this rank's shard, or what it owns; then every
  /// element is sent by the rank whose range it lies in.
  std::vector<float> gather(int tensor, DataType dtype, ElementRange local_range, const Read& read);
  /// The whole of a tensor that the axis `tensor` cuts, from the part of each rank.
  std::vector<float> whole_of_parts(int tensor, const std::vector<float>& local);
  /// This rank's part of a whole tensor, of so many items of T an element.
  template <typename T>
  static std::vector<T> part_of_whole(const TensorState& tensor, std::span<const T> whole,
                                      std::int64_t items = 1);
  /// Sends a tensor from the first stage that holds it to the others.
  std::vector<float> to_all_stages(int tensor, std::vector<float> values);
  /// Optimizer state, or the master weight with state -1.
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
