#pragma once
/// The collectives of a group whose ranks read each other's memory. Private to comm/.

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/node/node_layout.h"
#include "comm/node/reduce_plan.h"
#include "comm/node/window_all_reduce.h"
#include "comm/node/window_call.h"
#include "comm/node/window_policy.h"
#include "comm/transport/progress_engine.h"

namespace tranche::comm {

/// Knows the distribution of a group's members over nodes, decides which calls read peers' memory, and makes
/// their operations: within a node, or hierarchical across several.
class WindowAlgorithms {
 public:
  /// `members`: job ranks in group order; `self`: this rank's index among them. `engine` outlives this.
  WindowAlgorithms(ProgressEngine& engine, std::vector<int> members, int self);

  const NodeLayout& layout() const { return *layout_; }
  bool available() const { return available_; }
  /// The reason why ranks that were asked to read each other's memory cannot; empty when they can.
  std::string obstacle() const;
  /// True for a call in which each rank receives `bytes` from all others together. `least`: the limit for
  /// several nodes.
  bool serves(std::int64_t bytes, std::int64_t least = least_summed_bytes) const {
    if (layout_->nodes() == 1) least = least_bytes_on_one_node;
    return available_ && goes_by_window(engine_.options().collectives, bytes, least);
  }
  /// Like serves(). Across nodes messages are as good: an all-reduce adds rank after rank, so a node has
  /// nothing to sum in advance.
  bool serves_all_reduce(std::int64_t bytes) const { return layout_->nodes() == 1 && serves(bytes); }

  std::unique_ptr<Operation> all_gather(OperationInfo info, const void* shard, void* full, std::int64_t count,
                                        DataType dtype) const;
  std::unique_ptr<Operation> reduce_scatter(OperationInfo info, const void* full, DataType dtype,
                                            void* output, DataType output_dtype, std::int64_t count,
                                            const ReductionOptions& options) const;
  std::unique_ptr<Operation> all_reduce(OperationInfo info, void* values, std::int64_t count, DataType dtype,
                                        WindowAllReduce::Combine combine) const;
  /// See Communicator::summed_elements_sent. From any thread.
  std::int64_t summed_elements_sent(std::int64_t count, DataType dtype,
                                    const ReductionOptions& options) const;

 private:
  /// All arguments of a window call except its chunk. `readable`: this rank's memory that peers read.
  WindowCall window_call(void* readable, std::int64_t bytes, std::int64_t count, DataType dtype) const;
  std::unique_ptr<Operation> hierarchical_reduce_scatter(OperationInfo info, const void* full, DataType dtype,
                                                         void* output, DataType output_dtype,
                                                         std::int64_t count,
                                                         const ReductionOptions& options) const;
  std::shared_ptr<const ReducePlan> reduce_plan(const ReductionOptions& options, DataType dtype) const;

  ProgressEngine& engine_;
  std::vector<int> members_;
  int self_;
  std::shared_ptr<const NodeLayout> layout_;
  bool available_ = false;  ///< members that share a node, if there are any, can read each other's memory
  mutable std::mutex plans_mutex_;
  mutable std::map<std::tuple<int, int, DataType>, std::shared_ptr<const ReducePlan>>
      plans_;  ///< by group size, givers, dtype
};

}  // namespace tranche::comm
