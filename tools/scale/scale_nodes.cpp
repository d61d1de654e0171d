#include "tools/scale/scale_nodes.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

namespace tranche::tools {

namespace {

std::optional<int> number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1) return std::nullopt;
  return value;
}

/// Slots by host, in the order in which hosts are first named; nullopt if a host does not give its number.
using Slots = std::vector<std::pair<std::string, int>>;

void add_slots(Slots& hosts, const std::string& name, int slots) {
  const auto found =
      std::find_if(hosts.begin(), hosts.end(), [&](const auto& host) { return host.first == name; });
  if (found == hosts.end()) {
    hosts.emplace_back(name, slots);
  } else {
    found->second += slots;
  }
}

/// Parses "a:8,b:8"; a host without a number has one slot each time it is named.
std::optional<Slots> slots_of_list(const std::string& list) {
  Slots hosts;
  std::stringstream words(list);
  for (std::string word; std::getline(words, word, ',');) {
    const std::size_t colon = word.find(':');
    const std::optional<int> slots =
        colon == std::string::npos ? std::optional(1) : number(std::string_view(word).substr(colon + 1));
    if (!slots) return std::nullopt;
    add_slots(hosts, word.substr(0, colon), *slots);
  }
  return hosts;
}

/// Parses lines like "a slots=8 max_slots=16  # rack 1".
std::optional<Slots> slots_of_file(const std::string& text) {
  Slots hosts;
  std::stringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::stringstream words(line.substr(0, line.find('#')));
    std::string name;
    if (!(words >> name)) continue;
    std::optional<int> slots;
    for (std::string word; words >> word;) {
      if (word.starts_with("slots=")) slots = number(std::string_view(word).substr(6));
    }
    if (!slots) return std::nullopt;
    add_slots(hosts, name, *slots);
  }
  return hosts;
}

/// Slots are filled host by host: blocks of as many ranks as the first host has slots; the last may have
/// fewer.
std::optional<int> block_of(const std::optional<Slots>& hosts, int ranks) {
  if (!hosts || hosts->empty()) return std::nullopt;
  const int each = hosts->front().second;
  int placed = 0;
  for (const auto& [name, slots] : *hosts) {
    if (placed >= ranks) break;
    const int here = std::min(slots, ranks - placed);
    if (here != each && placed + here < ranks) return std::nullopt;
    if (here > each) return std::nullopt;
    placed += here;
  }
  if (placed < ranks) return std::nullopt;  // the launcher refuses, or distributes the excess ranks
  return std::min(each, ranks);
}

/// The launcher arguments that determine where ranks run.
struct Said {
  std::optional<int> per_node, nodes;
  std::optional<std::string> host, hostfile;
  bool other = false;  ///< a mapping other than by blocks
};

Said read_arguments(const std::vector<std::string>& words, bool srun) {
  Said said;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::size_t equals = words[i].starts_with("--") ? words[i].find('=') : std::string::npos;
    std::string flag = words[i].substr(0, equals);
    // A long flag with a single dash, such as -map-by, is read like --map-by.
    if (flag.starts_with("-") && !flag.starts_with("--") && flag.size() > 2) flag.insert(0, "-");
    const auto value = [&]() -> std::string {
      if (equals != std::string::npos) return words[i].substr(equals + 1);
      return i + 1 < words.size() ? words[i + 1] : "";
    };
    const auto per_node = [&](const std::optional<int>& count) {
      said.per_node = count;
      said.other |= !count;
    };
    if (srun) {
      if (flag == "--ntasks-per-node") per_node(number(value()));
      if (flag == "--nodes" || flag == "-N") said.nodes = number(value());
      if (flag == "--distribution" || flag == "-m") said.other |= !value().starts_with("block");
      continue;
    }
    if (flag == "-N" || flag == "--npernode") per_node(number(value()));
    if (flag == "--pernode") per_node(1);
    if (flag == "--host" || flag == "-H") said.host = value();
    if (flag == "--hostfile" || flag == "--machinefile") said.hostfile = value();
    if (flag == "--bynode" || flag == "--npersocket" || flag == "--rankfile") said.other = true;
    if (flag == "--rank-by") said.other |= value() != "slot" && value() != "core";
    if (flag != "--map-by") continue;
    const std::string by = value();
    const std::string unit = by.substr(0, by.find(':'));
    if (by.starts_with("ppr:")) {
      const std::size_t end = by.find(':', 4);
      const std::string_view of =
          end == std::string::npos ? std::string_view() : std::string_view(by).substr(end + 1);
      per_node(of.substr(0, of.find(':')) == "node" ? number(std::string_view(by).substr(4, end - 4))
                                                    : std::nullopt);
    } else {
      // One node is filled after the other by slot or core, unless mappings span nodes.
      said.other |= (unit != "slot" && unit != "core") || by.find("SPAN") != std::string::npos;
    }
  }
  return said;
}

/// srun spreads ranks over all its nodes, and not evenly, unless the number per node is given.
NodesOfRun nodes_of_srun(const Said& said, int ranks, const Allocation& allocation) {
  if (said.nodes) {
    const int nodes = std::min(*said.nodes, ranks);
    if (ranks % nodes != 0) return {};
    if (said.per_node) return {ranks / nodes, {}};
    return {ranks / nodes, {"--ntasks-per-node=" + std::to_string(ranks / nodes)}};
  }
  std::optional<int> each = said.per_node;
  if (!each && allocation.of_slurm && !allocation.nodes.empty()) each = block_of(allocation.nodes, ranks);
  if (!each) return {ranks == 1 ? std::optional(1) : std::nullopt, {}};
  each = std::min(*each, ranks);
  std::vector<std::string> arguments{"--nodes=" + std::to_string((ranks + *each - 1) / *each)};
  if (!said.per_node) arguments.push_back("--ntasks-per-node=" + std::to_string(*each));
  return {each, arguments};
}

/// Parses "a a b b".
Slots slots_of_words(std::istream& words) {
  Slots hosts;
  for (std::string name; words >> name;) add_slots(hosts, name, 1);
  return hosts;
}

/// Parses Slurm's "4(x2),3".
Slots slots_of_counts(const std::string& list) {
  Slots hosts;
  std::stringstream words(list);
  for (std::string word; std::getline(words, word, ',');) {
    const std::size_t times = word.find("(x");
    const std::optional<int> slots = number(std::string_view(word).substr(0, times));
    const std::optional<int> nodes =
        times == std::string::npos
            ? std::optional(1)
            : number(std::string_view(word).substr(times + 2, word.size() - times - 3));
    if (!slots || !nodes) return {};
    for (int i = 0; i < *nodes; ++i) hosts.emplace_back("node " + std::to_string(hosts.size()), *slots);
  }
  return hosts;
}

}  // namespace

Allocation Allocation::of_environment() {
  if (const char* counts = std::getenv("SLURM_TASKS_PER_NODE");
      counts != nullptr && std::getenv("SLURM_JOB_ID")) {
    return {slots_of_counts(counts), true};
  }
  if (const char* file = std::getenv("PBS_NODEFILE")) {
    std::ifstream lines(file);
    return {slots_of_words(lines), false};
  }
  if (const char* hosts = std::getenv("LSB_HOSTS")) {
    std::istringstream words(hosts);
    return {slots_of_words(words), false};
  }
  return {};
}

std::optional<int> ranks_per_node(const ScaleOptions& options, const std::string& hostfile, int ranks,
                                  const Allocation& allocation) {
  return nodes_of_run(options, hostfile, ranks, allocation).per_node;
}

NodesOfRun nodes_of_run(const ScaleOptions& options, const std::string& hostfile, int ranks,
                        const Allocation& allocation) {
  if (options.ranks_per_node > 0)
    return {static_cast<int>(std::min<std::int64_t>(options.ranks_per_node, ranks)), {}};
  const bool srun = options.launcher == "srun";
  const Said said = read_arguments(options.launcher_arguments, srun);
  if (said.other || said.hostfile) return {};
  if (srun) return nodes_of_srun(said, ranks, allocation);
  const auto per_node = [&]() -> std::optional<int> {
    if (said.per_node) return std::min(*said.per_node, ranks);
    if (said.host) return block_of(slots_of_list(*said.host), ranks);
    if (!options.host.empty()) return block_of(slots_of_list(options.host), ranks);
    if (!options.hostfile.empty()) return block_of(slots_of_file(hostfile), ranks);
    if (allocation.several()) return block_of(allocation.nodes, ranks);
    return ranks;
  };
  return {per_node(), {}};
}

}  // namespace tranche::tools
