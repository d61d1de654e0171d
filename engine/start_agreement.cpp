#include "engine/start_agreement.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "pipeline/schedule/text.h"
#include "tranche/core/error.h"
#include "tranche/version.h"

namespace tranche::detail {

namespace {

std::uint64_t hash_text(std::string_view text) {
  std::uint64_t hash = 14695981039346656037ull;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

/// Collective. The texts of rank 0 and of rank `other`.
std::pair<std::string, std::string> texts_of(Communicator& ranks, const std::string& mine, int other) {
  const OperationLabel label{"start", "difference", Traffic::control, Tier::host};
  const auto text_of = [&](int root) {
    std::string text = ranks.rank() == root ? mine : std::string();
    auto size = static_cast<std::int64_t>(text.size());
    ranks.broadcast(&size, 1, DataType::int64, root, {}, label).wait();
    text.resize(static_cast<std::size_t>(size));
    ranks.broadcast(text.data(), size, DataType::uint8, root, {}, label).wait();
    return text;
  };
  std::string first = text_of(0);
  return {std::move(first), text_of(other)};
}

/// Collective. The first line of ModelSpec::describe() in which rank `other` differs from rank 0.
std::string difference_of_models(Communicator& ranks, const ModelSpec& model, int other) {
  std::string mine;
  for (const std::string& line : model.describe()) mine += line + "\n";
  const auto [first, second] = texts_of(ranks, mine, other);
  const auto begin = static_cast<std::size_t>(
      std::mismatch(first.begin(), first.end(), second.begin(), second.end()).first - first.begin());
  const std::size_t before = begin == 0 ? std::string::npos : first.rfind('\n', begin - 1);
  const std::size_t line = before == std::string::npos ? 0 : before + 1;
  const auto line_of = [&](const std::string& text) {
    return line >= text.size() ? std::string("nothing") : text.substr(line, text.find('\n', line) - line);
  };
  return "it has " + line_of(second) + " where rank 0 has " + line_of(first);
}

/// Collective. The first key, in the order of their names, in which the configuration of rank `other` differs
/// from rank 0's.
std::string difference_of_configurations(Communicator& ranks, const Config& config, int other) {
  const auto [first, second] = texts_of(ranks, config.to_json(), other);
  const nlohmann::json one = nlohmann::json::parse(first).flatten(),
                       two = nlohmann::json::parse(second).flatten();
  for (const nlohmann::json& all : {one, two}) {
    for (const auto& [path, value] : all.items()) {
      const auto text_in = [&, key = path](const nlohmann::json& flat) {
        return flat.contains(key) ? flat[key].dump() : std::string("nothing");
      };
      if (text_in(one) == text_in(two)) continue;
      std::string key = path.substr(1);
      std::replace(key.begin(), key.end(), '/', '.');
      return "its " + key + " is " + text_in(two) + ", rank 0 has " + text_in(one);
    }
  }
  return "it writes the same values in another way";
}

}  // namespace

int agree_on_start(const Runtime& runtime, const Config& config, const ModelSpec& model, const Stages& stages,
                   const Optimizer& optimizer, const std::string& schedule) {
  Communicator& world = runtime.all();
  // The values that must be equal on all ranks, in the order in which a difference should be reported.
  struct Start {
    std::uint64_t version, cut, pipeline_schedule, configuration, optimizer, schedule, model_hash,
        fingerprint;
    std::int64_t local_size;
  };
  std::string cut;
  for (const int begin : stages.begins) cut += std::to_string(begin) + " ";
  const Start mine{
      hash_text(version),
      hash_text(cut),
      hash_text(stages.schedule == nullptr ? std::string() : pipeline::write_schedule(*stages.schedule)),
      hash_text(config.to_json()),
      hash_text(optimizer.name() + " " + optimizer.describe()),
      hash_text(schedule),
      model.hash(),
      hash_text(runtime.numerics_fingerprint()),
      (runtime.pipeline() == nullptr && runtime.tensor() == nullptr ? world : runtime.shard()).local_size()};
  std::vector<Start> starts(static_cast<std::size_t>(world.size()), mine);
  world
      .all_gather(&mine, starts.data(), sizeof(Start), DataType::uint8, 0, {},
                  OperationLabel{"start", "agree", Traffic::control, Tier::host})
      .wait();
  constexpr const char *of_model = "model", *of_configuration = "configuration";
  for (std::size_t r = 0; r < starts.size(); ++r) {
    // A different cut under the same configuration follows from a different model, which is reported instead.
    const bool configured = starts[r].configuration != starts[0].configuration;
    const char* differs = starts[r].version != starts[0].version         ? "library version"
                          : configured && starts[r].cut != starts[0].cut ? "cut"
                          : starts[r].pipeline_schedule != starts[0].pipeline_schedule
                              ? "schedule of the pipeline"
                          : configured                                   ? of_configuration
                          : starts[r].optimizer != starts[0].optimizer   ? "optimizer"
                          : starts[r].schedule != starts[0].schedule     ? "schedule"
                          : starts[r].model_hash != starts[0].model_hash ? of_model
                          : starts[r].fingerprint != starts[0].fingerprint
                              ? "numerics fingerprint (device kind, instruction set, libraries, threads)"
                              : nullptr;
    if (differs == nullptr) continue;
    const int other = static_cast<int>(r);
    const std::string how = differs == of_model ? ": " + difference_of_models(world, model, other)
                            : differs == of_configuration
                                ? ": " + difference_of_configurations(world, config, other)
                                : "";
    throw ConfigurationError(runtime.mesh().name_of_rank(other) + " was started with another " + differs +
                             " than rank 0" + how +
                             "; start all ranks with the same program, files and flags");
  }
  // Nodes may have different numbers of ranks, but all ranks need the same reduction order.
  return config.world_size_invariant     ? 0
         : runtime.replicas() != nullptr ? runtime.shard().size()
         : config.reduction_group > 0    ? config.reduction_group
                                         : static_cast<int>(starts[0].local_size);
}

void allocate_on_all(const Runtime& runtime, const std::function<void()>& work,
                     const std::function<std::string()>& advice) {
  Communicator& world = runtime.all();
  const int rank = world.rank(), ranks = world.size();
  std::string problem;
  bool of_budget = true;
  try {
    work();
  } catch (const OutOfMemory& error) {
    problem = error.message();
    if (const std::string more = advice(); !more.empty()) {
      problem += (problem.ends_with('\n') ? "" : "\n") + more;
    }
    of_budget = error.of_budget();
  }
  // Only some ranks may run out of memory, but all of them end with the same kind of error.
  const OperationLabel label{"start", "memory", Traffic::control, Tier::host};
  std::int64_t first = problem.empty() ? ranks : rank;
  world.all_reduce(&first, 1, DataType::int64, ReduceOperation::minimum, label).wait();
  if (first == ranks) return;
  std::array<char, 4096> text{};
  if (rank == first) problem.copy(text.data(), text.size() - 1);
  const auto bytes = static_cast<std::int64_t>(text.size());
  world.broadcast(text.data(), bytes, DataType::uint8, static_cast<int>(first), {}, label).wait();
  if (problem.empty())
    problem = runtime.mesh().name_of_rank(static_cast<int>(first)) + " ran out of memory: " + text.data();
  try {
    // No rank may end before all have the text: a failing rank also ends the broadcast of the sender, and a
    // later receiver would read whatever replaced the text.
    world.barrier(label).wait();
  } catch (const CommunicationError&) {
    // A peer has ended after the broadcast; this rank knows the reason.
  }
  throw OutOfMemory(problem, of_budget);
}

}  // namespace tranche::detail
