#include "comm/device/device_transport.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "device/launch_queues.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"

namespace tranche::comm {

namespace {

constexpr DeviceTransport all_transports[] = {DeviceTransport::automatic, DeviceTransport::nccl,
                                              DeviceTransport::staged, DeviceTransport::shared};

/// The first two ranks with equal `key`; {-1, -1} when there are none.
template <typename Key>
std::pair<int, int> first_alike(std::span<const DevicePlace> places, Key&& key) {
  std::map<std::string, int> seen;
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    const auto [found, fresh] = seen.emplace(key(places[rank]), static_cast<int>(rank));
    if (!fresh) return {found->second, static_cast<int>(rank)};
  }
  return {-1, -1};
}

/// All thread ranks of a process share the GPU's launch queues. A stream that waits for the host blocks a
/// peer's stream that shares its queue. A rank has three to eight streams, and more with several axes of the
/// mesh, offload or int8 blocks, so that streams of four ranks may share queues. The test
/// test_combinations_gpu.queues runs such meshes on as many queues as a GPU has, and none of them hangs.
constexpr std::size_t most_thread_ranks_of_gpu = detail::launch_queues / 8;

void require_queues(std::span<const DevicePlace> places) {
  std::map<std::pair<std::uint64_t, std::string>, std::vector<std::size_t>> sharing;
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    if (!places[rank].gpu.empty()) sharing[{places[rank].process, places[rank].gpu}].push_back(rank);
  }
  for (const auto& [place, ranks] : sharing) {
    if (ranks.size() <= most_thread_ranks_of_gpu) continue;
    throw ConfigurationError(fmt::format(
        "{} ranks of one process (rank {} is the first) share GPU {} of node {}, and its {} launch "
        "queues suffice for {}: with more, a rank that waits may hold up the one it waits for; start "
        "fewer ranks, or each as a process of its own",
        ranks.size(), ranks.front(), place.second, places[ranks.front()].node, detail::launch_queues,
        most_thread_ranks_of_gpu));
  }
}

}  // namespace

std::string_view name_of(DeviceTransport transport) {
  switch (transport) {
    case DeviceTransport::nccl:
      return "nccl";
    case DeviceTransport::staged:
      return "staged";
    case DeviceTransport::shared:
      return "shared";
    case DeviceTransport::automatic:
      break;
  }
  return "auto";
}

DeviceTransport device_transport_of(std::string_view name) {
  for (const DeviceTransport each : all_transports) {
    if (name == name_of(each)) return each;
  }
  throw ConfigurationError(fmt::format("'{}' is not one of auto, nccl, staged, shared", name));
}

CollectiveChoice collective_choice(std::string_view transport, std::string_view collectives) {
  CollectiveChoice choice;
  if (collectives == "messages") {
    choice.node = NodeCollectives::messages;
  } else if (collectives == "shared") {
    choice.node = NodeCollectives::shared;
  } else if (collectives != "auto" && collectives != "ours" && collectives != "nccl") {
    throw ConfigurationError(fmt::format(
        "tranche.collectives: '{}' is not one of auto, ours, messages, shared, nccl", collectives));
  }
  try {
    choice.transport = device_transport_of(transport);
  } catch (const ConfigurationError& error) {
    throw ConfigurationError("tranche.device_transport: " + error.message());
  }
  choice.by_library = collectives == "nccl";
  if (!choice.by_library) return choice;
  if (choice.transport == DeviceTransport::automatic) choice.transport = DeviceTransport::nccl;
  if (choice.transport != DeviceTransport::nccl) {
    throw ConfigurationError(
        fmt::format("tranche.collectives: nccl does not go with tranche.device_transport: {}", transport));
  }
  return choice;
}

void require_library_collectives(const CollectiveChoice& choice, DeviceKind device) {
  if (choice.by_library && device == DeviceKind::cpu) {
    throw ConfigurationError(
        "tranche.collectives: nccl reduces on GPUs; choose device cuda, or leave the key out");
  }
}

std::string reductions_of(const CollectiveChoice& choice) {
  return choice.by_library ? "; reductions by " + nccl_version() : "";
}

DeviceTransport choose_transport(DeviceTransport wanted, std::span<const DevicePlace> places, bool has_nccl) {
  require_queues(places);
  const std::string key = "tranche.device_transport: ";
  const auto in_gpu = [](const std::string& node, const DevicePlace& place) {
    return node + " " + place.gpu;
  };
  const auto same_gpu = first_alike(places, [&](const DevicePlace& p) { return in_gpu(p.node, p); });
  const auto same_for_nccl =
      first_alike(places, [&](const DevicePlace& p) { return in_gpu(p.nccl_node, p); });
  int without_gpu = -1, elsewhere = -1, other_device = -1;
  for (std::size_t rank = places.size(); rank-- > 0;) {
    if (places[rank].gpu.empty()) without_gpu = static_cast<int>(rank);
    if (places[rank].process != places[0].process) elsewhere = static_cast<int>(rank);
    if (places[rank].index != places[0].index) other_device = static_cast<int>(rank);
  }
  switch (wanted) {
    case DeviceTransport::nccl:
      if (!has_nccl) throw NotCompiled("NCCL", "TRANCHE_NCCL");
      if (without_gpu >= 0) {
        throw ConfigurationError(fmt::format(
            "{}nccl was asked for, but the device of rank {} is no GPU; choose device cuda, or auto", key,
            without_gpu));
      }
      if (same_for_nccl.first >= 0) {
        throw ConfigurationError(
            fmt::format("{}nccl was asked for, but ranks {} and {} share GPU {} ({}) of node {}, and NCCL "
                        "takes one rank a GPU; start "
                        "one rank a GPU, or choose auto or staged (for a smoke test only, give every process "
                        "an NCCL_HOSTID "
                        "of its own)",
                        key, same_for_nccl.first, same_for_nccl.second,
                        places[static_cast<std::size_t>(same_for_nccl.first)].index,
                        places[static_cast<std::size_t>(same_for_nccl.first)].gpu,
                        places[static_cast<std::size_t>(same_for_nccl.first)].node));
      }
      return wanted;
    case DeviceTransport::shared:
      if (elsewhere >= 0) {
        throw ConfigurationError(
            fmt::format("{}shared was asked for, but ranks 0 and {} are not threads of one process; choose "
                        "auto or staged",
                        key, elsewhere));
      }
      if (other_device >= 0) {
        throw ConfigurationError(fmt::format(
            "{}shared was asked for, but ranks 0 and {} are on devices {} and {}; choose auto or nccl", key,
            other_device, places[0].index, places[static_cast<std::size_t>(other_device)].index));
      }
      return wanted;
    case DeviceTransport::staged:
      return wanted;
    case DeviceTransport::automatic:
      break;
  }
  if (elsewhere < 0 && other_device < 0) return DeviceTransport::shared;
  if (has_nccl && without_gpu < 0 && same_gpu.first < 0) return DeviceTransport::nccl;
  return DeviceTransport::staged;
}

}  // namespace tranche::comm
