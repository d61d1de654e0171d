#include "tranche/planner/host_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/state_layout.h"
#include "partition/placement.h"
#include "planner/planned_run.h"

namespace tranche::planner {

namespace {

/// Plans after the first: each says what buffers of the disk's part are no longer needed.
constexpr int most_rounds = 3;
/// Another plan is made for this gain or more.
constexpr std::int64_t least_gain = std::int64_t{1} << 20;
constexpr std::int64_t most_margin = std::int64_t{4} << 30;

/// One rank of each class whose plans may differ.
std::vector<int> differing_ranks(const PlanRequest& request) {
  const Mesh mesh = request.config.mesh_of(request.ranks);
  std::vector<int> ranks;
  for (const int first : mesh.group({MeshAxis::pipeline}, 0)) {
    const std::vector<int> parts = mesh.group({MeshAxis::tensor}, first);
    for (const std::vector<int>& alike : equal_ranks(request, parts)) {
      ranks.push_back(parts[static_cast<std::size_t>(alike.front())]);
    }
  }
  return ranks;
}

/// Host memory through which a checkpoint's largest part goes to where no file is read to.
std::int64_t bytes_to_load(const PlanRequest& request) {
  const Config config = checked_config(request);
  const detail::Placement placement = detail::place(planned_spec(request), config, request.ranks);
  const bool on_gpu = request.device == DeviceKind::cuda &&
                      (config.offload.optimizer == OffloadTier::none || config.offload.ratio < 1);
  std::int64_t bytes = 0;
  for (int number = 0; number < static_cast<int>(placement.buffers().size()); ++number) {
    const detail::Placement::Buffer& buffer = placement.buffer(number);
    if (buffer.empty() || !(buffer.frozen || on_gpu)) continue;
    for (const detail::FlatLayout& layout : buffer.layouts) {
      const std::int64_t kept =
          buffer.frozen || config.stage > 0 ? layout.shard_elements() : layout.padded_elements();
      bytes = std::max(bytes, kept * size_of(buffer.frozen ? config.precision.compute : DataType::float32));
    }
  }
  return bytes;
}

struct Need {
  std::int64_t host = 0;   ///< bytes of the rank that needs most
  std::int64_t asked = 0;  ///< state that is asked for on nvme
};

Need need_of(const PlanRequest& request, const std::vector<int>& ranks, std::int64_t bytes) {
  PlanRequest each = request;
  each.config.offload.host_state = bytes;
  Need most;
  for (const int rank : ranks) {
    each.rank = rank;
    const PlanResult plan = plan_run(each);
    // The device memory of a CPU is the host's, and has no part in a limit that is given.
    const bool device = request.device == DeviceKind::cpu && request.host_memory.found_here();
    most.host = std::max(most.host, plan.tier(Tier::host).peak + (device ? plan.tier(Tier::device).peak : 0));
    most.asked = std::max(most.asked, plan.state.asked_on_nvme);
  }
  return most;
}

/// Bytes of memory found on this machine that are left alone: programs take more than a run accounts for.
std::int64_t margin_of(const HostMemory& memory) {
  return memory.found_here() ? std::min(memory.bytes / 8, most_margin) : 0;
}

std::string source_of(const HostMemory& memory) {
  if (!memory.found_here()) return "the limit that is given";
  return fmt::format("what {}, less {}",
                     memory.source == HostMemory::Source::control_group ? "its control group's limit leaves"
                                                                        : "this machine has available",
                     format_bytes(margin_of(memory)));
}

}  // namespace

void resolve_host_state(PlanRequest& request) {
  OffloadConfig& offload = request.config.offload;
  if (!offload.uses_nvme() || offload.host_state >= 0) return;
  const HostMemory& memory = request.host_memory;
  if (memory.bytes == 0) {
    offload.host_state = 0;
    offload.host_state_reason = ", as auto finds no limit of host memory (--host-memory gives one)";
    return;
  }
  const std::int64_t allowed = memory.bytes - margin_of(memory);
  const std::vector<int> ranks = differing_ranks(request);
  const Need least = need_of(request, ranks, 0);
  const std::int64_t beside = least.host + bytes_to_load(request);
  std::int64_t bytes = std::clamp<std::int64_t>(allowed - beside, 0, least.asked);
  // State that stays needs no buffers on its way from the disk.
  std::int64_t next = bytes;
  for (int round = 0; round < most_rounds && next > 0 && next < least.asked; ++round) {
    const std::int64_t left = allowed - (beside - least.host) - need_of(request, ranks, next).host;
    if (left < 0) break;
    bytes = next;
    if (left < least_gain) break;
    next = std::min(least.asked, next + left);
  }
  offload.host_state = bytes;
  offload.host_state_reason =
      fmt::format(", as auto finds {} a rank ({}), of which all else takes {}; 0 has all on the disk",
                  format_bytes(allowed), source_of(memory), format_bytes(beside));
}

}  // namespace tranche::planner
