#include "tranche/planner/host_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <string>
#include <vector>

#include "checkpoint/reader.h"
#include "engine/state_layout.h"
#include "offload/aligned_buffer.h"
#include "partition/placement.h"
#include "planner/levers.h"
#include "planner/planned_run.h"
#include "tranche/device/memory.h"
#include "tranche/partition/mesh.h"

namespace tranche::planner {

namespace {

/// Plans after the first.
constexpr int most_rounds = 6;
/// Another plan is made for this gain or more.
constexpr std::int64_t least_gain = std::int64_t{1} << 20;
constexpr std::int64_t most_margin = std::int64_t{4} << 30;
constexpr std::int64_t no_limit = std::numeric_limits<std::int64_t>::max();
/// Stands for a rank whose plan failed: more than any limit, and less than overflows a sum.
constexpr std::int64_t beyond_all = std::int64_t{1} << 61;

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

/// Host memory that a run takes to resume: a reader's, and that through which a checkpoint's largest part
/// goes to where no file is read to.
std::int64_t bytes_to_load(const PlanRequest& request) {
  const Config config = checked_config(request);
  const OffloadConfig& offload = config.offload;
  const detail::Placement placement = detail::place(planned_spec(request), config, request.ranks);
  const bool on_gpu =
      request.device == DeviceKind::cuda && (offload.optimizer == OffloadTier::none || offload.ratio < 1);
  // Master weights in halves are put together in host memory; what lies in tiles has whole ones.
  const bool halves = config.precision.master == MasterFormat::split &&
                      (offload.optimizer != OffloadTier::nvme || offload.ratio < 1);
  std::int64_t bytes = 0;
  for (int number = 0; number < static_cast<int>(placement.buffers().size()); ++number) {
    const detail::Placement::Buffer& buffer = placement.buffer(number);
    if (buffer.empty() || !(buffer.frozen || on_gpu || halves)) continue;
    for (const detail::FlatLayout& layout : buffer.layouts) {
      const std::int64_t kept =
          buffer.frozen || config.stage > 0 ? layout.shard_elements() : layout.padded_elements();
      bytes = std::max(bytes, kept * size_of(buffer.frozen ? config.precision.compute : DataType::float32));
    }
  }
  bytes = bytes > 0 ? aligned_bytes(detail::AlignedBuffer::requested_bytes(bytes)) : 0;
  return bytes + checkpoint::Reader::staging_bytes();
}

/// The request with as few micro-batches as have the peak of all, where that is known.
PlanRequest with_few_micro_batches(const PlanRequest& request) {
  PlanRequest few = request;
  Config& config = few.config;
  const bool alike = config.mesh_of(request.ranks).size(MeshAxis::pipeline) == 1 &&
                     !config.world_size_invariant && config.accumulation_steps > trial_micro_batches;
  if (!alike) return few;
  config.accumulation_steps = trial_micro_batches;
  config.train_batch_size =
      config.micro_batch_size * config.accumulation_steps * config.data_ranks(request.ranks);
  return few;
}

/// Host memory of the micro-batches that the plan leaves out: a GPU's batches are staged for the whole step.
std::int64_t staged_beside(const PlanRequest& all, const PlanRequest& planned) {
  if (all.device != DeviceKind::cuda || !all.model.language) return 0;
  const std::int64_t left_out = all.config.accumulation_steps - planned.config.accumulation_steps;
  if (left_out == 0) return 0;
  const std::int64_t tokens = all.config.micro_batch_size * all.model.sequence_or_longest(all.sequence);
  return left_out * (all.documents ? 4 : 2) * 4 * tokens + memory_alignment;
}

/// The host memory of the rank that needs most, found by all processes together: each plans its `ranks`, and
/// they agree on each number, so that all go through the same plans. An error of one is thrown once all have
/// finished.
class HostNeed {
 public:
  HostNeed(const PlanRequest& request, std::vector<int> ranks, const MostOfAll& most)
      : request_(with_few_micro_batches(request)),
        staged_(staged_beside(request, request_)),
        ranks_(std::move(ranks)),
        most_(most) {}

  std::int64_t to_load() {
    return agreed([&] { return bytes_to_load(request_); });
  }
  /// Host memory of a run with `bytes` for state that is asked for on nvme.
  std::int64_t host(std::int64_t bytes) {
    return agreed([&] {
      std::int64_t most = 0;
      request_.config.offload.host_state = bytes;
      for (const int rank : ranks_) {
        request_.rank = rank;
        const PlanResult plan = plan_run(request_);
        // The device memory of a CPU is the host's, and has no part in a limit that is given.
        const bool device = request_.device == DeviceKind::cpu && request_.host_memory.found_here();
        most = std::max(most,
                        staged_ + plan.tier(Tier::host).peak + (device ? plan.tier(Tier::device).peak : 0));
        asked_ = std::max(asked_, plan.state.asked_on_nvme);
      }
      return most;
    });
  }
  /// State that is asked for on nvme, once host() was called.
  std::int64_t asked() { return most_(asked_); }
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  template <class Work>
  std::int64_t agreed(const Work& work) {
    std::int64_t own = beyond_all;
    try {
      if (!failure_) own = work();
    } catch (...) {
      failure_ = std::current_exception();
    }
    return std::min(most_(own), beyond_all);
  }

  PlanRequest request_;
  std::int64_t staged_;
  std::vector<int> ranks_;
  const MostOfAll& most_;
  std::int64_t asked_ = 0;
  std::exception_ptr failure_;
};

/// Bytes that are left alone of what a control group's limit leaves: programs take more than a run accounts
/// for.
std::int64_t margin_of(const HostMemory& memory) {
  return std::min(memory.bytes / 8, most_margin);
}

/// A limit is used up; of a machine that others may use too half is left to them.
std::int64_t allowed_of(const HostMemory& memory) {
  switch (memory.source) {
    case HostMemory::Source::this_machine:
      return memory.bytes / 2;
    case HostMemory::Source::control_group:
      return memory.bytes - margin_of(memory);
    case HostMemory::Source::configuration:
    case HostMemory::Source::unlimited:
      break;
  }
  return memory.bytes == 0 ? no_limit : memory.bytes;
}

std::string source_of(const HostMemory& memory) {
  switch (memory.source) {
    case HostMemory::Source::this_machine:
      return "half of what this machine has available; --host-memory gives another limit";
    case HostMemory::Source::control_group:
      return fmt::format("what its control group's limit leaves, less {}", format_bytes(margin_of(memory)));
    case HostMemory::Source::configuration:
    case HostMemory::Source::unlimited:
      break;
  }
  return "the limit that is given";
}

void resolve(PlanRequest& request, std::vector<int> ranks, const MostOfAll& most) {
  OffloadConfig& offload = request.config.offload;
  const std::int64_t allowed = -most(-allowed_of(request.host_memory));
  if (allowed == no_limit) {
    offload.host_state = 0;
    offload.host_state_reason = ", because auto found no limit of host memory (--host-memory gives one)";
    return;
  }
  HostNeed need(request, std::move(ranks), most);
  const std::int64_t to_load = need.to_load();
  const std::int64_t beside = need.host(0) + to_load, asked = need.asked();
  std::int64_t fits = 0;  // the most that a plan has found to fit
  std::int64_t next = std::clamp<std::int64_t>(allowed - beside, 0, asked);
  // State that stays needs no buffers on its way from the disk, so that more may fit than was left.
  for (int round = 0; round < most_rounds && next > fits; ++round) {
    const std::int64_t left = allowed - to_load - need.host(next);
    if (left >= 0) fits = next;
    if (left >= 0 && left < least_gain) break;
    next = std::clamp<std::int64_t>(next + left, 0, asked);
  }
  need.rethrow();
  offload.host_state = fits;
  offload.host_state_reason = fmt::format(
      ", because auto found {} a rank ({}), of which everything else takes {}; 0 puts all of this state on "
      "the disk",
      format_bytes(allowed), source_of(request.host_memory), format_bytes(beside));
}

}  // namespace

std::int64_t most_host_state(const HostMemory& memory) {
  const std::int64_t allowed = allowed_of(memory);
  return allowed == no_limit ? 0 : allowed;
}

void resolve_host_state(PlanRequest& request) {
  if (!request.config.offload.uses_nvme() || request.config.offload.host_state >= 0) return;
  resolve(request, differing_ranks(request), [](std::int64_t own) { return own; });
}

void resolve_host_state(PlanRequest& request, const MostOfAll& most) {
  if (!request.config.offload.uses_nvme() || request.config.offload.host_state >= 0) return;
  resolve(request, {request.rank}, most);
}

}  // namespace tranche::planner
