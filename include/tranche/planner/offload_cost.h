#pragma once
/// The seconds that offloaded state costs a step, by stated rates: a step's copies, host updates and disk
/// transfers, walked through in the order in which the engine issues them. docs/internals/offload.md has the
/// model.

#include <cstdint>
#include <string>
#include <vector>

#include "tranche/config/config.h"
#include "tranche/engine/offload_traffic.h"

namespace tranche::planner {

/// Parameters that one core updates in a second where its memory keeps up (fp32 Adam).
inline constexpr double core_update_rate = 0.85e9;

/// Rates of a rank, a second, from which a step's cost is estimated.
struct CostModel {
  double network = 12.5e9;                ///< bytes sent
  double operations = 100e12;             ///< floating-point operations
  double host_link = 50e9;                ///< bytes between device and host memory, each way
  double nvme = 5e9;                      ///< bytes read and written
  double host_update = core_update_rate;  ///< parameters updated in host memory
  std::string machine = {};               ///< whose rates these are; empty: those of flags, or the defaults
  /// Bytes sent along other axes of a mesh than `shard`; 0: as `network`.
  double over_replicate = 0, over_context = 0, over_tensor = 0, over_pipeline = 0;
};

/// A unit as offloading sees it, on one rank.
struct OffloadUnit {
  std::int64_t kept = 0;      ///< elements whose optimizer state the rank keeps
  std::int64_t shard = 0;     ///< elements that a gather brings from elsewhere
  std::int64_t gathered = 0;  ///< elements of the whole unit
  bool moves = false;         ///< the optimizer state is not on the device
  std::int64_t whole = 0;  ///< elements of `kept` whose weights are whole on the device, wherever others live
  std::int64_t stays = 0;  ///< of a unit that moves, in other buffers: elements that the device updates and
                           ///< whose weights live elsewhere
  // With tranche.host_state, of what is asked for on nvme, elements that stay in host memory: of `kept` the
  // state, of `shard` the weights, and of the weights that the rank updates.
  std::int64_t state_in_host = 0, shard_in_host = 0, updated_in_host = 0;
};

/// The part of a micro-batch that computes with one unit's weights.
struct UnitVisit {
  int unit = 0;
  double operations = 0;        ///< a token
  bool gathers = true;          ///< stage 3: asks for the weights anew
  bool ends_gradients = false;  ///< the unit's gradients are complete after it
};

struct OffloadSchedule {
  std::vector<OffloadUnit> units;  ///< in forward order
  std::vector<UnitVisit> visits;   ///< of a micro-batch, in order
  /// Inputs of blocks that go to the host in forward and come back in backward, and bytes a token of each.
  std::int64_t kept_inputs = 0, input_bytes = 0;
  std::int64_t row_ranks = 1;  ///< of the axis `tensor`, that have a share of each input's tokens
  double state_bytes = 12;     ///< of an element, master and optimizer state
  std::int64_t passes = 1;     ///< how often a step reads and writes them on the nvme tier
};

/// Seconds of a step and rank.
struct OffloadCost {
  OffloadSeconds busy;           ///< each road by itself
  OffloadTraffic bytes;          ///< bytes that they move, without the disk's padding
  double compute = 0;            ///< with what is computed again
  double exposed = 0;            ///< seconds that compute and the step boundary wait for them
  double least_exposed = 0;      ///< of it, what no number of tokens hides
  double break_even_tokens = 0;  ///< of the rank and step, from which on only least_exposed is exposed (0:
                                 ///< nothing to hide; infinity: nothing computes)
};

/// `tokens` are those of a micro-batch of the rank.
OffloadCost offload_cost(const OffloadSchedule& schedule, const Config& config, double tokens,
                         const CostModel& rates);

}  // namespace tranche::planner
