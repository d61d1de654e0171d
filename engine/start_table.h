#pragma once
/// The table that a run prints first, for people. Private to engine/.

#include <string>
#include <string_view>
#include <vector>

#include "engine/formulas.h"
#include "engine/stages.h"
#include "engine/traffic_formulas.h"
#include "engine/whole_matrices.h"
#include "tranche/engine/runtime.h"

namespace tranche::detail {

class StartTable {
 public:
  /// All arguments must outlive it.
  StartTable(const Runtime& runtime, const Config& config, const ModelSpec& model, const Stages& stages,
             const StateStore& store, const StateFormulas& formulas, const TrafficFormulas& traffic,
             const WholeMatrices& matrices);

  /// `routing`: Optimizer::routing(). `notes` are printed after those of the configuration. Its ignored keys
  /// have a line each, or, unless `verbose`, one line together.
  std::string text(const std::string& routing, const std::vector<std::string>& notes, bool verbose);

 private:
  void row(std::string_view name, std::string_view value);
  void add_ranks();
  void add_compute(const std::string& routing);
  void add_state();
  void add_resident();
  void add_activations();
  void add_traffic();
  /// Notes the bytes that the layers of a group of the axes `tensor` and `context` send between nodes.
  void add_messages_between_nodes();
  /// Adds a note if `group`, this rank's group of `axis`, has ranks on several nodes and its layers send
  /// `bytes`.
  void add_messages_between_nodes(const Communicator* group, MeshAxis axis, std::int64_t bytes);
  void add_notes(const std::vector<std::string>& notes, bool verbose);
  /// The bytes that a rank sends for so many elements of a group's buffers, plus others as int8 blocks.
  std::string sent(std::int64_t elements, DataType dtype, std::int64_t as_blocks) const;
  std::string sent_parameters(std::int64_t elements) const;
  bool gathers_each_use() const { return gathers_ && config_.gather_for == GatherFor::use; }

  const Runtime& runtime_;
  const Config& config_;
  const ModelSpec& model_;
  const Stages& stages_;
  const StateStore& store_;
  const StateFormulas& formulas_;
  const TrafficFormulas& traffic_;
  const WholeMatrices& matrices_;
  int shards_;            ///< ranks over which ZeRO shards state
  bool gathers_ = false;  ///< some unit is gathered when it is used
  std::string text_;
};

}  // namespace tranche::detail
