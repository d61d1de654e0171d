#include "tranche/planner/offload_cost.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "tranche/core/shape.h"

namespace tranche::planner {

namespace {

/// The model divides a unit's update into at most this many steps: the real tiles, or larger ones.
constexpr std::int64_t most_pieces = 64;
/// The micro-batches of the model: the first, one in the middle, the last.
constexpr std::int64_t walked_micro_batches = 3;
/// Buffers of a step are rounded up to a multiple of this many bytes.
constexpr std::int64_t step_memory_rounding = 256;

class Walk {
 public:
  Walk(const OffloadSchedule& schedule, const Config& config, const CostModel& rates)
      : schedule_(schedule),
        config_(config),
        rates_(rates),
        weight_(static_cast<double>(size_of(config.precision.compute))) {
    if (config.update == UpdateTime::at_the_boundary) at_the_boundary_ = update(0);
  }

  /// Seconds that a step waits if its micro-batches have `tokens` tokens.
  double exposed(double tokens) const {
    const std::int64_t walked = std::min(config_.accumulation_steps, walked_micro_batches);
    const Updates updates = at_the_boundary_ ? *at_the_boundary_ : update(tokens);
    double waited = 0, now = 0, link = 0, disk = 0, out = updates.weights_out;
    std::vector<double> ends;            // end times of the visits that gathered
    std::vector<std::int64_t> gathered;  // elements of these visits and of the current one
    for (std::int64_t m = 0; m < walked; ++m) {
      const bool last = m + 1 == walked;
      double waited_here = 0;
      for (const UnitVisit& visit : schedule_.visits) {
        const auto index = static_cast<std::size_t>(visit.unit);
        const OffloadUnit& unit = schedule_.units[index];
        double ready = updates.arrival[index];
        const bool brings = parameters() != OffloadTier::none && visit.gathers && (m == 0 || !keeps());
        if (brings) {
          gathered.push_back(unit.gathered);
          const std::size_t ahead = units_at_once(gathered);
          double begin = !config_.overlap ? now : ends.size() < ahead ? 0.0 : ends[ends.size() - ahead];
          begin = std::max(begin, ready);
          const double bytes = static_cast<double>(unit.shard) * weight_;
          if (unit.shard_in_host < unit.shard && parameters() == OffloadTier::nvme) {
            begin = disk = std::max(disk, begin) +
                           static_cast<double>(unit.shard - unit.shard_in_host) * weight_ / rates_.nvme;
          }
          ready = link = std::max(link, begin) + bytes / rates_.host_link;
        }
        waited_here += std::max(0.0, ready - now);
        now = std::max(now, ready) + visit.operations * tokens / rates_.operations;
        if (brings) ends.push_back(now);
        if (last && visit.ends_gradients && unit.moves) {
          out = std::max(out, now) + gradient_bytes(unit) / rates_.host_link;
          if (!config_.overlap) {
            waited_here += out - now;
            now = out;
          }
        }
      }
      if (last) waited_here += std::max(0.0, out - now);
      // The micro-batches between the first and the last are equal, so one of them counts for all.
      const bool between = m == 1 && !last;
      waited += waited_here * (between ? static_cast<double>(config_.accumulation_steps - 2) : 1.0);
    }
    return waited;
  }

  OffloadTraffic bytes() const {
    OffloadTraffic bytes;
    const std::int64_t weight = size_of(config_.precision.compute);
    for (const OffloadUnit& unit : schedule_.units) {
      if (unit.moves) {
        bytes.to_host += unit.kept * size_of(config_.precision.accumulation);
        bytes.from_host += (unit.kept - away(unit)) * weight;
        bytes.to_host += unit.stays * weight;
        if (config_.offload.optimizer == OffloadTier::nvme) {
          const std::int64_t tiles =
              schedule_.passes *
              std::llround(static_cast<double>(unit.kept - unit.state_in_host) * schedule_.state_bytes);
          bytes.nvme_read += tiles;
          bytes.nvme_written += tiles;
        }
      } else {
        bytes.to_host += away(unit) * weight;
      }
      if (parameters() == OffloadTier::nvme) {
        bytes.nvme_written += (away(unit) + unit.stays - unit.updated_in_host) * weight;
      }
    }
    if (parameters() == OffloadTier::none) return bytes;
    for (const UnitVisit& visit : schedule_.visits) {
      if (!visit.gathers) continue;
      const OffloadUnit& unit = schedule_.units[static_cast<std::size_t>(visit.unit)];
      const std::int64_t times = keeps() ? 1 : config_.accumulation_steps;
      bytes.from_host += unit.shard * weight * times;
      if (parameters() == OffloadTier::nvme) {
        bytes.nvme_read += (unit.shard - unit.shard_in_host) * weight * times;
      }
    }
    return bytes;
  }

  double updated() const {
    double elements = 0;
    for (const OffloadUnit& unit : schedule_.units) {
      if (unit.moves) elements += static_cast<double>(unit.kept);
    }
    return elements;
  }

 private:
  bool keeps() const { return config_.gather_for == GatherFor::step; }
  OffloadTier parameters() const { return config_.offload.parameters; }
  /// Elements whose state this rank holds and whose weights are not on the device.
  std::int64_t away(const OffloadUnit& unit) const {
    return parameters() == OffloadTier::none ? 0 : unit.kept - unit.whole;
  }
  double gradient_bytes(const OffloadUnit& unit) const {
    return static_cast<double>(unit.kept * size_of(config_.precision.accumulation));
  }

  /// The number of gathered units, the last one included, while the last one of `gathered` is fetched. The
  /// next unit is always fetched ahead, whatever its size; others follow as the keys allow
  /// (ParameterGatherer::gather_ahead).
  std::size_t units_at_once(const std::vector<std::int64_t>& gathered) const {
    const auto depth = std::min(static_cast<std::size_t>(std::max(1, config_.depth)), gathered.size());
    std::size_t units = std::min<std::size_t>(depth, 2);
    std::int64_t beyond = gathered.back(), live = gathered.back();
    for (std::size_t i = 1; i < units; ++i) live += gathered[gathered.size() - 1 - i];
    for (; units < depth; ++units) {
      live += gathered[gathered.size() - 1 - units];
      if (units > 2) beyond += gathered[gathered.size() + 1 - units];
      if (beyond > config_.prefetch_elements || live > config_.max_live_elements) break;
    }
    return units;
  }

  /// The effect of a step's updates on the next step, whose first micro-batch begins at time 0.
  struct Updates {
    std::vector<double> arrival;  ///< by unit: its new weights are where its next use finds them
    double weights_out = 0;       ///< the link out is busy with weights that the device updated
  };
  /// The time until which each of these is busy: the disk, the host's update, and the link to the device and
  /// from it.
  struct Roads {
    double disk = 0, host = 0, back = 0, out = 0;
  };

  /// Each tile is read from the disk, updated, and copied, one step after the other. At the boundary the
  /// units are updated in forward order, as soon as the norm is known. With `as_reduced` they are updated in
  /// the order in which their gradients have left the device, while the last micro-batch computes.
  Updates update(double tokens) const {
    Updates updates;
    updates.arrival.resize(schedule_.units.size());
    Roads roads;
    double end = 0;  // when the step ends
    std::vector<char> done(schedule_.units.size());
    if (config_.update == UpdateTime::as_reduced) {
      double gradients_out = 0;
      for (const UnitVisit& visit : schedule_.visits) {
        end += visit.operations * tokens / rates_.operations;
        const auto index = static_cast<std::size_t>(visit.unit);
        const OffloadUnit& unit = schedule_.units[index];
        if (!visit.ends_gradients) continue;
        if (unit.moves)
          gradients_out = std::max(gradients_out, end) + gradient_bytes(unit) / rates_.host_link;
        updates.arrival[index] = update(unit, unit.moves ? gradients_out : end, roads);
        done[index] = 1;
      }
      end = std::max(end, gradients_out);
    }
    for (std::size_t i = 0; i < schedule_.units.size(); ++i) {
      if (done[i] == 0) updates.arrival[i] = update(schedule_.units[i], end, roads);
    }
    for (double& arrival : updates.arrival) arrival = std::max(0.0, arrival - end);
    updates.weights_out = std::max(0.0, roads.out - end);
    if (config_.overlap || updates.arrival.empty()) return updates;
    std::fill(updates.arrival.begin(), updates.arrival.end(),
              *std::max_element(updates.arrival.begin(), updates.arrival.end()));
    return updates;
  }

  /// Returns when the unit's new weights, whose update may begin at `begin`, are where they belong.
  double update(const OffloadUnit& unit, double begin, Roads& roads) const {
    const bool from_disk = config_.offload.optimizer == OffloadTier::nvme;
    double arrived = 0;
    const auto take = [&](double& road, double seconds) { return road = std::max(road, begin) + seconds; };
    const std::int64_t pieces =
        std::clamp<std::int64_t>(divide_round_up(unit.kept, config_.offload.tile_elements), 1, most_pieces);
    const double elements = static_cast<double>(unit.kept) / static_cast<double>(pieces);
    const double bytes = elements * weight_;
    const auto of_kept = [&](std::int64_t some) {
      return static_cast<double>(some) / static_cast<double>(std::max<std::int64_t>(unit.kept, 1));
    };
    const double share = of_kept(away(unit));
    const double state_on_disk = 1 - of_kept(unit.state_in_host);
    // The share of the moving weights that the disk receives.
    const double written = static_cast<double>(away(unit) + unit.stays - unit.updated_in_host) /
                           static_cast<double>(std::max<std::int64_t>(away(unit) + unit.stays, 1));
    for (std::int64_t piece = 0; piece < pieces && unit.kept > 0; ++piece) {
      if (unit.moves) {
        if (from_disk && state_on_disk > 0) {
          const double moved =
              2 * static_cast<double>(schedule_.passes) * elements * state_on_disk * schedule_.state_bytes;
          roads.host = std::max(roads.host, take(roads.disk, moved / rates_.nvme));
        }
        arrived = take(roads.host, elements / rates_.host_update);
        if (share < 1) {
          arrived = roads.back = std::max(roads.back, roads.host) + bytes * (1 - share) / rates_.host_link;
        }
      } else if (share > 0) {
        arrived = take(roads.out, bytes * share / rates_.host_link);
      }
      if (parameters() == OffloadTier::nvme && share * written > 0) {
        arrived = std::max(arrived, take(roads.disk, bytes * share * written / rates_.nvme));
      }
    }
    const double sent = static_cast<double>(unit.stays) * weight_;
    if (sent > 0) {
      take(roads.out, sent / rates_.host_link);
      if (parameters() == OffloadTier::nvme) take(roads.disk, sent * written / rates_.nvme);
      arrived = std::max({arrived, roads.out, parameters() == OffloadTier::nvme ? roads.disk : 0.0});
    }
    return arrived;
  }

  const OffloadSchedule& schedule_;
  const Config& config_;
  const CostModel& rates_;
  const double weight_;
  std::optional<Updates> at_the_boundary_;  ///< the same for any number of tokens
};

}  // namespace

OffloadCost offload_cost(const OffloadSchedule& schedule, const Config& config, double tokens,
                         const CostModel& rates) {
  OffloadCost cost;
  double operations = 0;  // for one token
  for (const UnitVisit& visit : schedule.visits) operations += visit.operations;
  const auto micro_batches = static_cast<double>(config.accumulation_steps);
  cost.compute = operations * tokens * micro_batches / rates.operations;
  if (!config.offload.any()) return cost;
  const Walk walk(schedule, config, rates);
  cost.bytes = walk.bytes();
  cost.busy.to_host = static_cast<double>(cost.bytes.to_host) / rates.host_link;
  cost.busy.from_host = static_cast<double>(cost.bytes.from_host) / rates.host_link;
  cost.busy.host_update = walk.updated() / rates.host_update;
  cost.busy.disk = static_cast<double>(cost.bytes.nvme_read + cost.bytes.nvme_written) / rates.nvme;
  cost.exposed = walk.exposed(tokens);
  const double roads = cost.busy.to_host + cost.busy.from_host + cost.busy.host_update + cost.busy.disk;
  if (roads > 0 && operations > 0) {
    // `far` is beyond the tokens at which any link is hidden. With more tokens the exposed time approaches
    // its least value.
    constexpr double far = 1e6, near = 1e-6;
    double above = far * roads * rates.operations / operations;
    cost.least_exposed = walk.exposed(above);
    double below = above / far * near;
    const double hidden = cost.least_exposed + 1e-6 * roads;
    while (above / below > 1 + 1e-9) {
      const double middle = std::sqrt(below * above);
      (walk.exposed(middle) <= hidden ? above : below) = middle;
    }
    cost.break_even_tokens = above * micro_batches;
  } else if (roads > 0) {
    cost.least_exposed = cost.exposed;
    cost.break_even_tokens = std::numeric_limits<double>::infinity();
  }
  if (config.offload.activations && schedule.kept_inputs > 0) {
    // This time grows with the tokens as compute does, so it is hidden at any number of them or at none.
    const auto rows = static_cast<std::int64_t>(std::ceil(tokens / static_cast<double>(schedule.row_ranks)));
    const std::int64_t input = schedule.input_bytes * rows;
    const std::int64_t moved =
        schedule.kept_inputs * round_up(input, step_memory_rounding) * config.accumulation_steps;
    cost.bytes.to_host += moved;
    cost.bytes.from_host += moved;
    const auto bytes = static_cast<double>(moved);
    const double seconds = bytes / rates.host_link;
    cost.busy.to_host += seconds;
    cost.busy.from_host += seconds;
    cost.exposed += std::max(0.0, seconds - cost.compute / 3) + std::max(0.0, seconds - cost.compute * 2 / 3);
  }
  return cost;
}

}  // namespace tranche::planner
