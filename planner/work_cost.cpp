#include "planner/work_cost.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>

#include "planner/collective_cost.h"
#include "tranche/core/dtype.h"
#include "tranche/core/error.h"

namespace tranche::planner {

using detail::GemmShape;
using detail::RecordedWork;
using detail::WorkKind;

namespace {

double bytes(const RecordedWork& work) {
  return work.bytes_read + work.bytes_written;
}

}  // namespace

WorkCost::WorkCost(const ProjectionRequest& request, const Config& config)
    : machine_(request.machine),
      config_(config),
      ranks_(request.plan.ranks),
      mesh_(config.mesh_of(request.plan.ranks)),
      ranks_per_node_(request.plan.ranks_per_node > 0
                          ? std::min(request.plan.ranks_per_node, request.plan.ranks)
                          : request.plan.ranks),
      network_(request.network ? *request.network : request.machine.network.value_or(LinkRate{})),
      sharing_(request.sharing > 0 ? request.sharing : ranks_per_node_),
      share_(machine_.share(sharing_)) {
  const int threads = config.threads > 0 ? config.threads : std::max(1, machine_.cores / sharing_);
  on_cpu_ = machine_.device == DeviceKind::cpu;
  if (on_cpu_) {
    const double cores_each = static_cast<double>(machine_.cores) / sharing_;
    cores_ = std::max(1.0, cores_each);
    threads_ = std::min(static_cast<double>(threads), cores_);
    // If a rank has fewer cores than the measured share had, its rates fall in proportion.
    slower_ = share_.threads / std::min(threads_, cores_each);
    if (slower_ != 1) {
      notes_.insert(fmt::format("rates of {} threads taken in proportion for {:g} on each of {} ranks",
                                share_.threads, threads_, sharing_));
    }
  }
  if (request.plan.ranks > ranks_per_node_ && !request.network && !machine_.network) {
    throw ConfigurationError(
        fmt::format("{} ranks, {} on a node, need --network RATE,LATENCY: the machine file of {} has no "
                    "network between nodes",
                    request.plan.ranks, ranks_per_node_, machine_.name));
  }
}

double WorkCost::seconds(const RecordedWork& work, int rank, const std::string& lane,
                         std::vector<Claim>& claims) {
  switch (work.kind) {
    case WorkKind::kernel:
      if (on_cpu_) claims.push_back({cores, threads_});
      if (lane == "host update" && !on_cpu_) return bytes(work) / machine_.host_bytes_per_second;
      return kernel_seconds(work) * slower_;
    case WorkKind::copy_to_host:
    case WorkKind::copy_from_host:
      return copy_seconds(work, lane, claims);
    case WorkKind::collective:
      return work.ranks < 2 ? 0 : collective_seconds_of(work, placed(work, rank), work.full_bytes, claims);
    case WorkKind::receive:
      // If two ranks gather, each sends the other a message of half of the bytes.
      return collective_seconds_of(work, placed_message(work, rank), 2 * work.full_bytes, claims);
    case WorkKind::disk_read:
    case WorkKind::disk_write:
      return disk_seconds(work, claims);
    case WorkKind::send:
    case WorkKind::join:
    case WorkKind::mark:
      break;
  }
  return 0;
}

double WorkCost::node_bytes(const RecordedWork& work, int rank) const {
  const bool message = work.kind == WorkKind::send;
  if (!message && (work.kind != WorkKind::collective || work.ranks < 2)) return 0;
  const auto [operation, inside, groups] = message ? placed_message(work, rank) : placed(work, rank);
  return crossing_bytes(machine_, operation, work.ranks, inside, static_cast<int>(size_of(work.dtype)),
                        message ? 2 * work.full_bytes : work.full_bytes, config_.collectives == "nccl",
                        groups, config_.collectives == "messages");
}

const ProductTable& WorkCost::product_table(const GemmShape& product) const {
  const std::string layout = product.transpose_a ? "tn" : product.transpose_b ? "nt" : "nn";
  const ProductTable* any = nullptr;
  for (const ProductTable& table : share_.products) {
    if (table.dtype != product.dtype) continue;
    if (table.layout == layout) return table;
    any = &table;
  }
  if (any == nullptr) {
    throw ConfigurationError(fmt::format("the machine file of {} has no rates of {} products", machine_.name,
                                         name_of(product.dtype)));
  }
  return *any;
}

double WorkCost::kernel_seconds(const RecordedWork& work) {
  double seconds = 0;
  const GemmShape& product = work.gemm;
  if (product.m > 0) {
    const double m = static_cast<double>(product.m), n = static_cast<double>(product.n),
                 k = static_cast<double>(product.k);
    seconds = 2 * m * n * k / product_table(product).rate(m, n, k);
    if (work.name == "matmul") return seconds;
  }
  for (const KernelTable& table : share_.kernels) {
    if (table.name != work.name || table.dtype != config_.precision.compute) continue;
    return seconds + table.time.seconds(table.by == "operations" ? work.operations : bytes(work));
  }
  if (machine_.measured()) {
    notes_.insert(fmt::format("kernel {} was not measured: taken at the speed of memory", work.name));
  }
  // Without a measurement the rate is memory bandwidth, or that of large GEMMs if the kernel consists of them
  // (attention).
  const double moved = (product.m > 0 ? work.bytes_written : bytes(work)) / share_.memory_bytes_per_second;
  if (product.m > 0) return seconds + moved;
  double fastest = 0;
  for (const ProductTable& table : share_.products) {
    if (table.dtype == config_.precision.compute) fastest = std::max(fastest, table.rates.back());
  }
  return std::max(moved, fastest > 0 ? work.operations / fastest : 0.0);
}

double WorkCost::copy_seconds(const RecordedWork& work, const std::string& lane, std::vector<Claim>& claims) {
  const bool link = lane == "to host" || lane == "from host";
  if (!link && on_cpu_) return work.bytes_written / share_.memory_bytes_per_second;
  double rate = machine_.host_link.bytes_per_second;
  const double memory = work.bytes_written / rate;
  if (on_cpu_ && config_.debug.host_link_bytes_per_second > 0) {
    rate = std::min(rate, config_.debug.host_link_bytes_per_second);
  }
  const double seconds = machine_.host_link.latency_seconds + work.bytes_written / rate;
  if (on_cpu_) claims.push_back({cores, std::min(1.0, memory / seconds)});
  return seconds;
}

WorkCost::Placed WorkCost::placed(const RecordedWork& work, int rank) const {
  const bool all = work.ranks == ranks_;
  const int inside = all ? std::min(ranks_per_node_, work.ranks) : work.ranks_on_node;
  // A barrier takes as long as a small all_gather.
  return {work.name == "barrier" ? "all_gather" : work.name, inside, all ? 1 : groups_on_node(work, rank)};
}

/// The groups like the collective's that have a member on the rank's node, and do the same there. Only ranks
/// of the stages that take part have such a group: those of both ends of a pipeline for a tied table.
int WorkCost::groups_on_node(const RecordedWork& work, int rank) const {
  const int node = rank / ranks_per_node_;
  const auto [found, is_new] = groups_.try_emplace({work.members, node}, 0);
  if (is_new) found->second = count_groups(*work.members, node);
  return found->second;
}

int WorkCost::count_groups(const std::vector<int>& members, int node) const {
  std::array<std::set<int>, mesh_axes> taken;
  for (int a = 0; a < mesh_axes; ++a) {
    for (const int member : members) {
      taken[static_cast<std::size_t>(a)].insert(mesh_.coordinate(static_cast<MeshAxis>(a), member));
    }
  }
  const int first = node * ranks_per_node_;
  std::set<std::array<int, mesh_axes>> groups;
  for (int other = first; other < std::min(first + ranks_per_node_, ranks_); ++other) {
    std::array<int, mesh_axes> group{};
    bool has_one = true;
    for (int a = 0; a < mesh_axes; ++a) {
      const auto axis = static_cast<std::size_t>(a);
      const int at = mesh_.coordinate(static_cast<MeshAxis>(a), other);
      // A group may take a block of an axis: ranks of the axis tensor that share a head.
      group[axis] = at / static_cast<int>(taken[axis].size());
      if (static_cast<MeshAxis>(a) != MeshAxis::pipeline || taken[axis].size() == 1) continue;
      group[axis] = 0;
      has_one = taken[axis].contains(at);
    }
    if (has_one) groups.insert(group);
  }
  return std::max(1, static_cast<int>(groups.size()));
}

WorkCost::Placed WorkCost::placed_message(const RecordedWork& work, int rank) const {
  const bool same_node = work.members->front() / ranks_per_node_ == rank / ranks_per_node_;
  // All ranks of a stage on a node send at the same time.
  return {"all_gather", same_node ? 2 : 1, std::max(1, ranks_per_node_ / work.ranks_on_node)};
}

double WorkCost::collective_seconds_of(const RecordedWork& work, const Placed& place, double full_bytes,
                                       std::vector<Claim>& claims) {
  const auto element = static_cast<int>(size_of(work.dtype));
  const auto& [operation, inside, groups] = place;
  if (on_cpu_) {
    if (const CollectiveTable* table = nearest_table(machine_, operation, inside, element)) {
      claims.push_back({cores, std::min(table->cores, 1.0)});
      if (table->ranks != inside) {
        notes_.insert(
            fmt::format("{} of {} ranks on a node extrapolated from {}", operation, inside, table->ranks));
      }
    }
  }
  return collective_seconds(machine_, network_, operation, work.ranks, inside, element, full_bytes,
                            config_.collectives == "nccl", groups, config_.collectives == "messages");
}

double WorkCost::disk_seconds(const RecordedWork& work, std::vector<Claim>& claims) const {
  if (!machine_.disk) {
    throw ConfigurationError(fmt::format(
        "offload to nvme, but the machine file of {} has no disk; calibrate with --dir DIR", machine_.name));
  }
  if (bytes(work) == 0) return 0;
  claims.push_back({disk_resource, 1});
  if (on_cpu_) claims.push_back({cores, machine_.disk_cores * cores_ / machine_.cores});
  const bool read = work.kind == WorkKind::disk_read && machine_.disk_read_bytes_per_second > 0;
  return machine_.disk->latency_seconds +
         bytes(work) / (read ? machine_.disk_read_bytes_per_second : machine_.disk->bytes_per_second);
}

}  // namespace tranche::planner
