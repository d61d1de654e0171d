#pragma once
/// The seconds that offloaded state adds to a step at given rates. The model walks through a step's copies,
/// host updates and disk transfers in the order in which the engine issues them; docs/internals/offload.md
/// describes it.

#include <cstdint>
#include <string>
#include <vector>

#include "tranche/config/config.h"
#include "tranche/engine/offload_traffic.h"

namespace tranche::planner {

/// Parameters a second that one core updates as long as memory bandwidth suffices (fp32 Adam).
inline constexpr double core_update_rate = 0.85e9;

/// Rates of one rank, per second, from which the cost of a step is estimated.
struct CostModel {
  double network = 12.5e9;                ///< bytes sent
  double operations = 100e12;             ///< floating-point operations
  double host_link = 50e9;                ///< bytes between device and host memory, in each direction
  double nvme = 5e9;                      ///< bytes read and written
  double host_update = core_update_rate;  ///< parameters updated in host memory
  std::string machine = {};               ///< machine that has these rates; empty: they come from flags or
                                          ///< are the defaults
  /// Bytes sent along the axes of the mesh other than `shard`; 0: the rate of `network`.
  double over_replicate = 0, over_context = 0, over_tensor = 0, over_pipeline = 0;
};

/// One unit on one rank, with the sizes that matter to offloading.
struct OffloadUnit {
  std::int64_t kept = 0;      ///< elements whose optimizer state this rank holds
  std::int64_t shard = 0;     ///< elements that a gather copies from host memory or nvme
  std::int64_t gathered = 0;  ///< elements of the whole unit
  bool moves = false;         ///< true if the optimizer state is not on the device
  std::int64_t whole = 0;  ///< elements of `kept` whose weights stay whole on the device, wherever the other
                           ///< weights are
  std::int64_t stays = 0;  ///< elements in buffers that do not move, of a unit that moves: the device updates
                           ///< them, and then sends their weights to the host or to nvme
  // Elements that stay in host memory though they are requested on nvme (tranche.host_state): of `kept` the
  // state, of `shard` the weights, and of the weights that the rank updates.
  std::int64_t state_in_host = 0, shard_in_host = 0, updated_in_host = 0;
};

/// The part of a micro-batch that computes with one unit's weights.
struct UnitVisit {
  int unit = 0;
  double operations = 0;        ///< for one token
  bool gathers = true;          ///< stage 3: gathers the weights again
  bool ends_gradients = false;  ///< the unit's gradients are complete after this visit
};

struct OffloadSchedule {
  std::vector<OffloadUnit> units;  ///< in forward order
  std::vector<UnitVisit> visits;   ///< the visits of one micro-batch, in order
  /// Inputs of blocks that forward copies to the host and backward copies back, and the bytes of each for one
  /// token.
  std::int64_t kept_inputs = 0, input_bytes = 0;
  std::int64_t row_ranks = 1;  ///< ranks of the axis `tensor`, each of which has a share of each input's
                               ///< tokens
  double state_bytes = 12;     ///< bytes of one element: master weight and optimizer state
  std::int64_t passes = 1;     ///< how often a step reads and writes the state on the nvme tier
};

/// Seconds of one step on one rank.
struct OffloadCost {
  OffloadSeconds busy;           ///< busy time of each link and of the disk
  OffloadTraffic bytes;          ///< bytes that they transfer, without the disk's padding
  double compute = 0;            ///< includes recomputation
  double exposed = 0;            ///< seconds in which compute and the step boundary wait for transfers and
                                 ///< host updates
  double least_exposed = 0;      ///< the part of `exposed` that no number of tokens hides
  double break_even_tokens = 0;  ///< tokens of a rank's step from which on only least_exposed is exposed (0:
                                 ///< nothing to hide; infinity: nothing computes)
};

/// `tokens`: the tokens of one micro-batch on the rank.
OffloadCost offload_cost(const OffloadSchedule& schedule, const Config& config, double tokens,
                         const CostModel& rates);

}  // namespace tranche::planner
