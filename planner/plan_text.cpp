#include "tranche/planner/plan_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <tuple>
#include <utility>

#include "core/folded_name.h"
#include "tranche/version.h"

namespace tranche::planner {

namespace {

using nlohmann::ordered_json;

constexpr std::size_t listed_items = 12;

/// For example "50.00 GB/s", in units of 10^9 bytes as vendors count the speed of links; MB/s below 0.1 GB/s.
std::string link_speed(double bytes_per_second) {
  const double value = bytes_per_second / 1e9;
  if (value < 0.1) return fmt::format("{:.2f} MB/s", value * 1e3);
  return fmt::format("{:.{}f} GB/s", value, value < 10 ? 3 : value < 1000 ? 2 : 1);
}

std::string operations_text(double operations) {
  static constexpr const char* units[] = {"", " kFLOP", " MFLOP", " GFLOP", " TFLOP", " PFLOP", " EFLOP"};
  std::size_t unit = 0;
  while (std::abs(operations) >= 999.5 && unit + 1 < std::size(units)) {
    operations /= 1000;
    ++unit;
  }
  return fmt::format("{:.3g}{}", operations, unit == 0 ? " FLOP" : units[unit]);
}

/// For example "1,234,567".
std::string grouped(std::int64_t value) {
  std::string text = std::to_string(value);
  for (auto at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > (value < 0 ? 1 : 0); at -= 3) {
    text.insert(static_cast<std::size_t>(at), ",");
  }
  return text;
}

struct LiveGroup {
  std::string tag;
  Category category = Category::other;
  std::int64_t count = 0;
  std::int64_t bytes = 0;
};

/// The entries in descending order of their values.
template <typename Name>
std::vector<LiveGroup> live_groups(const TierAccount& account, Name&& name) {
  std::map<std::pair<std::string, Category>, LiveGroup> groups;
  for (const LiveItem& item : account.live_at_peak) {
    LiveGroup& group = groups[{name(item.tag), item.category}];
    group.tag = name(item.tag);
    group.category = item.category;
    ++group.count;
    group.bytes += item.bytes;
  }
  std::vector<LiveGroup> list;
  for (auto& [key, group] : groups) list.push_back(std::move(group));
  std::stable_sort(list.begin(), list.end(),
                   [](const LiveGroup& a, const LiveGroup& b) { return a.bytes > b.bytes; });
  return list;
}

/// Splits the ledger's label "backward h.11" into phase and unit.
std::pair<std::string, std::string> phase_and_unit(const TierAccount& account) {
  const std::size_t space = account.peak_phase.find(' ');
  if (space == std::string::npos) return {account.peak_phase, ""};
  return {account.peak_phase.substr(0, space), account.peak_phase.substr(space + 1)};
}

std::string row(std::string_view name, const std::string& value) {
  return fmt::format("  {:<22} {}\n", name, value);
}

std::string model_rows(const PlanRequest& request, const PlanResult& result) {
  const auto config = ordered_json::parse(result.config);
  const auto model = ordered_json::parse(result.model);
  Config effective = request.config;
  validate_config(effective, request.ranks);
  std::string text = row("model", fmt::format("{}: {} parameters ({} with padding)", request.model.name,
                                              grouped(model["parameters"].get<std::int64_t>()),
                                              grouped(result.padded_elements)));
  text += row(
      "rank",
      fmt::format("{} of {}{}", request.rank, request.ranks,
                  request.ranks_per_node > 0 ? fmt::format(", {} on a node", request.ranks_per_node) : ""));
  const bool shared = effective.replicate == Replicate::parameters && effective.stage > 0;
  const int owners = result.mesh.state_ranks() * (shared ? result.mesh.size(MeshAxis::replicate) : 1);
  if (const std::string coordinates = result.mesh.describe(request.rank); !coordinates.empty()) {
    text += row("mesh", fmt::format("{}; this is {}", result.mesh.to_string(), coordinates));
  } else if (result.mesh.size(MeshAxis::replicate) > 1) {
    text += row("mesh", result.mesh.to_string());
  }
  text += row("stage", fmt::format("{}, {} reduction{}", effective.stage,
                                   name_of(effective.effective_reduction(owners)),
                                   request.ranks == 1 ? " (one rank: all stages hold the same)"
                                   : owners == 1 && result.mesh.size(MeshAxis::tensor) == 1
                                       ? " (nothing is sharded: all stages hold the same)"
                                       : ""));
  text += row("batch", effective.batch_text(effective.data_ranks(request.ranks)));
  text += row("dtypes", effective.dtypes_text());
  if (request.model.language) {
    text += row("activations", effective.activation_checkpointing
                                   ? fmt::format("checkpointed every {} block{}", effective.checkpoint_every,
                                                 effective.checkpoint_every == 1 ? "" : "s")
                                   : "kept");
  } else {
    text += row("activations",
                "NOT COVERED: a list of units does not describe activations; add what the model keeps");
  }
  for (const std::string& note : result.notes) text += row("note", note);
  return text;
}

std::string state_rows(const PlanRequest& request, const PlanResult& result) {
  const Engine::StateBytes& state = result.state;
  std::vector<Tier> tiers;
  for (const Tier tier : all_tiers) {
    const auto& on = state.tiers[static_cast<std::size_t>(tier)];
    if (on.parameters + on.gradients + on.optimizer > 0) tiers.push_back(tier);
  }
  std::string text = "\nmodel state of this rank\n";
  const bool split = tiers.size() > 1;
  if (split) {
    text += fmt::format("  {:<16}{:>14}", "", "in all");
    for (const Tier tier : tiers) text += fmt::format("{:>14}", name_of(tier));
    text += "\n";
  }
  const auto line = [&](const char* name, std::int64_t bytes, auto&& part) {
    text += fmt::format("  {:<16}{:>14}", name, format_bytes(bytes));
    for (const Tier tier : tiers) {
      if (split)
        text += fmt::format("{:>14}", format_bytes(part(state.tiers[static_cast<std::size_t>(tier)])));
    }
    text += "\n";
  };
  using OnTier = Engine::StateBytes::OnTier;
  line("parameters", state.parameters, [](const OnTier& on) { return on.parameters; });
  line("gradients", state.gradients, [](const OnTier& on) { return on.gradients; });
  line("optimizer", state.optimizer, [](const OnTier& on) { return on.optimizer; });
  line("in all", state.parameters + state.gradients + state.optimizer,
       [](const OnTier& on) { return on.parameters + on.gradients + on.optimizer; });
  text += fmt::format("  {:<16}{:>14}\n", "of it padding", format_bytes(state.padding));
  if (state.asked_on_nvme > 0) {
    text += fmt::format("  of {} B asked for on nvme {} B stay in host memory: tranche.host_state is {}{}\n",
                        state.asked_on_nvme, state.stay_in_host,
                        format_bytes(request.config.offload.host_state_bytes()),
                        request.config.offload.host_state_reason);
  }
  return text;
}

std::string milliseconds(double seconds) {
  return fmt::format("{:.3g} ms", seconds * 1e3);
}

/// The bytes that move between tiers, the time of that at the given rates, and the number of tokens from
/// which on it is hidden.
std::string offload_rows(const PlanRequest& request, const PlanResult& result) {
  Config effective = request.config;
  validate_config(effective, request.ranks);
  if (!effective.offload.any()) return {};
  const OffloadTraffic& bytes = result.offload_bytes;
  const OffloadCost& cost = result.offload;
  const CostModel& rates = request.rates;
  std::string text = fmt::format("\n{:<22}{:>14}{:>14}  {}\n", "offload in a step", "bytes", "takes", "at");
  const auto line = [&](const char* name, const std::string& count, double seconds, const std::string& at) {
    text += fmt::format("  {:<20}{:>14}{:>14}  {}\n", name, count, milliseconds(seconds), at);
  };
  const auto from = [&](const char* flag) { return ", " + (rates.machine.empty() ? flag : rates.machine); };
  const std::string link = link_speed(rates.host_link) + from("--host-link");
  line("device to host", format_bytes(bytes.to_host), cost.busy.to_host, link);
  line("host to device", format_bytes(bytes.from_host), cost.busy.from_host, link);
  if (cost.busy.host_update > 0) {
    line("update on the host", "", cost.busy.host_update,
         fmt::format("{:.3g} G parameters/s", rates.host_update / 1e9) + from("--host-update"));
  }
  if (bytes.nvme_read + bytes.nvme_written > 0) {
    line("read from nvme", format_bytes(bytes.nvme_read), static_cast<double>(bytes.nvme_read) / rates.nvme,
         link_speed(rates.nvme) + from("--nvme-bandwidth"));
    line("written to nvme", format_bytes(bytes.nvme_written),
         static_cast<double>(bytes.nvme_written) / rates.nvme, "reads and writes share it");
  }
  if (cost.compute == 0) {
    return text + "  flops_per_token is not given, so whether compute hides this is not known\n";
  }
  line("compute", grouped(result.tokens) + " tok", cost.compute,
       operations_text(rates.operations) + "/s" + from("--flops"));
  const double of_compute = 100 * cost.exposed / cost.compute;
  text += fmt::format("  {:<20}{:>14}{:>14}  {:.3g}% of compute\n", "exposed", "", milliseconds(cost.exposed),
                      of_compute);
  const double at_break_even = cost.break_even_tokens / static_cast<double>(result.tokens) * cost.compute;
  const auto tokens = [](double count) { return grouped(std::llround(std::ceil(count))); };
  text += fmt::format(
      "  tokens per step at which offload is hidden: {} of a rank{}\n", tokens(cost.break_even_tokens),
      request.ranks > 1 ? ", " + tokens(cost.break_even_tokens * request.ranks) + " of all" : "");
  text += cost.least_exposed < 1e-9 ? "    from there on nothing is exposed\n"
                                    : fmt::format(
                                          "    from there on {} stay exposed, {:.3g}% of compute there: the "
                                          "first units' return, the last "
                                          "gradients\n",
                                          milliseconds(cost.least_exposed),
                                          at_break_even > 0 ? 100 * cost.least_exposed / at_break_even : 0.0);
  return text;
}

std::string memory_rows(const PlanRequest& request, const PlanResult& result) {
  std::string text;
  for (const Tier tier : all_tiers) {
    const TierAccount& account = result.tier(tier);
    if (account.peak == 0) {
      text += fmt::format("\n{} memory: none\n", name_of(tier));
      continue;
    }
    text += fmt::format("\n{:<18}{:>14}{:>14}{:>14}\n", fmt::format("{} memory", name_of(tier)),
                        "at the peak", "its own peak", "held always");
    for (const Category category : all_categories) {
      if (category == Category::activations && tier == Tier::device && !request.model.covers_activations()) {
        text +=
            fmt::format("  {:<16}{:>14}{:>14}{:>14}\n", name_of(category), "not covered", "not covered", "");
        continue;
      }
      if (account.category_peak[category] == 0) continue;
      text += fmt::format(
          "  {:<16}{:>14}{:>14}{:>14}\n", name_of(category), format_bytes(account.at_peak[category]),
          format_bytes(account.category_peak[category]), format_bytes(account.persistent[category]));
    }
    text += fmt::format("  {:<16}{:>14}{:>14}{:>14}\n", "in all", format_bytes(account.peak), "",
                        format_bytes(account.persistent.total()));
    if (tier == Tier::device) {
      text += "  (other includes the parts of the step's packed block that are unused at that moment)\n";
    }
    const auto [phase, unit] = phase_and_unit(account);
    text += fmt::format("  peak of {} ({} B) in {}{}; held then:\n", format_bytes(account.peak),
                        grouped(account.peak), phase, unit.empty() ? "" : " of " + unit);
    const std::vector<LiveGroup> live = live_groups(account, detail::with_folded_numbers);
    std::int64_t rest = 0, more = 0;
    for (std::size_t i = 0; i < live.size(); ++i) {
      if (i >= listed_items) {
        rest += live[i].bytes;
        ++more;
        continue;
      }
      text += fmt::format("    {:>12}  {:>5.1f}%  {}{} ({})\n", format_bytes(live[i].bytes),
                          100.0 * static_cast<double>(live[i].bytes) / static_cast<double>(account.peak),
                          live[i].count > 1 ? fmt::format("{} x ", live[i].count) : "", live[i].tag,
                          name_of(live[i].category));
    }
    if (more > 0) text += fmt::format("    {:>12}          {} more\n", format_bytes(rest), more);
  }
  return text;
}

TrafficCount sum_of(const std::map<std::string, TrafficCount>& counts) {
  TrafficCount sum;
  for (const auto& [operation, count] : counts) {
    sum.calls += count.calls;
    sum.elements += count.elements;
    sum.bytes += count.bytes;
  }
  return sum;
}

std::string traffic_rows(const PlanRequest& request, const PlanResult& result) {
  std::string text =
      fmt::format("\n{:<22}{:>10}{:>22}{:>14}\n", "sent in a step", "calls", "elements", "bytes");
  const auto line = [&](const std::string& name, const TrafficCount& count) {
    text += fmt::format("  {:<20}{:>10}{:>22}{:>14}\n", name, count.calls > 0 ? grouped(count.calls) : "",
                        grouped(count.elements), format_bytes(count.bytes));
  };
  for (const auto& [operation, count] : result.data) line(operation, count);
  const TrafficCount data = sum_of(result.data);
  line("data in all", data);
  if (result.axes.size() > 1) {
    for (const auto& [axis, sent] : result.axes) {
      line(fmt::format("  by {}", name_of(axis)), {0, sent.elements, sent.bytes});
    }
  }
  const std::optional<std::int64_t> formula = result.formula_elements;
  text += fmt::format("  {:<20}{:>10}{:>22}{}\n", "by the formula", "",
                      formula ? grouped(*formula) : "none for chains",
                      !formula || formula == data.elements ? "" : "  (differs)");
  line("control", sum_of(result.control));
  if (request.ranks > 1 && request.ranks_per_node > 0) {
    text += row("data to other nodes",
                result.node_crossing_bytes ? fmt::format("{} from its node, {} of them from this rank",
                                                         format_bytes(*result.node_crossing_bytes),
                                                         format_bytes(result.crossing_bytes))
                : result.crossing_exact
                    ? fmt::format("{} from this rank; others of its node may send more or less",
                                  format_bytes(result.crossing_bytes))
                    : fmt::format("at most {}: less if data for all ranks of a node crosses only once",
                                  format_bytes(result.crossing_bytes)));
  }
  if (const std::optional<OtherGathering>& other = result.other_gathering) {
    const auto change = [](std::int64_t there, std::int64_t here, const std::string& text) {
      return fmt::format("{} {}", text, there < here ? "less" : "more");
    };
    const std::int64_t peak = result.tier(Tier::device).peak;
    text += row(fmt::format("with gather_for {}", name_of(other->gather_for)),
                change(other->peak, peak, format_bytes(std::abs(other->peak - peak))) + " at the peak, " +
                    change(other->bytes, data.bytes, format_bytes(std::abs(other->bytes - data.bytes))) +
                    " sent in a step");
  }
  const OffloadTraffic& moved = result.offload_bytes;
  const auto bytes = [](std::int64_t count) {
    return count > 0 ? format_bytes(count) : std::string("nothing");
  };
  text += row("host and device", bytes(moved.to_host + moved.from_host));
  text += row("NVMe", bytes(moved.nvme_read + moved.nvme_written));
  text += row("work of a step", request.model.covers_activations()
                                    ? fmt::format("{} counted by the kernels; {} by the model's formula",
                                                  operations_text(result.work.floating_point_operations),
                                                  operations_text(result.model_operations))
                                    : fmt::format("{} by the list's flops_per_token",
                                                  operations_text(result.model_operations)));
  return text;
}

ordered_json traffic_count_json(const TrafficCount& count) {
  return {{"calls", count.calls}, {"elements", count.elements}, {"bytes", count.bytes}};
}

ordered_json rates_json(const CostModel& rates) {
  return {{"network_bytes_per_second", rates.network},
          {"operations_per_second", rates.operations},
          {"host_link_bytes_per_second", rates.host_link},
          {"nvme_bytes_per_second", rates.nvme},
          {"host_update_parameters_per_second", rates.host_update}};
}

ordered_json offload_json(const PlanRequest& request, const PlanResult& result) {
  Config effective = request.config;
  validate_config(effective, request.ranks);
  if (!effective.offload.any()) return nullptr;
  const OffloadCost& cost = result.offload;
  const bool known = std::isfinite(cost.break_even_tokens);
  return {
      {"break_even_tokens_per_step", known ? ordered_json(cost.break_even_tokens) : ordered_json(nullptr)},
      {"exposed_seconds", cost.exposed},
      {"least_exposed_seconds", cost.least_exposed},
      {"compute_seconds", cost.compute},
      {"to_host_seconds", cost.busy.to_host},
      {"from_host_seconds", cost.busy.from_host},
      {"host_update_seconds", cost.busy.host_update},
      {"disk_seconds", cost.busy.disk},
      {"cost_model", rates_json(request.rates)}};
}

ordered_json plan_object(const PlanRequest& request, const PlanResult& result, std::int64_t budget) {
  ordered_json document;
  document["schema"] = plan_schema;
  document["version"] = version;
  document["model_name"] = request.model.name;
  document["world"] = request.ranks;
  document["ranks_per_node"] = request.ranks_per_node > 0 ? request.ranks_per_node : request.ranks;
  document["rank"] = request.rank;
  document["mesh"] = result.mesh.to_string();
  document["coordinate"] = {{"replicate", result.mesh.coordinate(MeshAxis::replicate, request.rank)},
                            {"shard", result.mesh.coordinate(MeshAxis::shard, request.rank)}};
  for (const MeshAxis axis : {MeshAxis::pipeline, MeshAxis::context, MeshAxis::tensor}) {
    if (result.mesh.size(axis) == 1) continue;
    document["coordinate"][std::string(name_of(axis))] = result.mesh.coordinate(axis, request.rank);
  }
  document["config"] = ordered_json::parse(result.config);
  document["stage"] = document["config"]["zero_optimization"]["stage"];
  document["covers_activations"] = request.model.covers_activations();
  document["budget_bytes"] = budget > 0 ? ordered_json(budget) : ordered_json(nullptr);
  document["fits"] =
      budget > 0 ? ordered_json(shortages(request, result, budget).empty()) : ordered_json(nullptr);
  const HostMemory& host = request.host_memory;
  const bool here = host.found_here();
  document["host_memory"] = {
      {"source", name_of(host.source)},
      {"bytes_per_rank", host.bytes > 0 ? ordered_json(host.bytes) : ordered_json(nullptr)},
      {"available_bytes", here ? ordered_json(host.available) : ordered_json(nullptr)},
      {"ranks_sharing", here ? ordered_json(host.sharing) : ordered_json(nullptr)}};
  document["state"] = {{"parameters", result.state.parameters},
                       {"gradients", result.state.gradients},
                       {"optimizer", result.state.optimizer},
                       {"padding", result.state.padding}};
  if (result.state.asked_on_nvme > 0) {
    document["host_state"] = {{"bytes", request.config.offload.host_state_bytes()},
                              {"asked_on_nvme", result.state.asked_on_nvme},
                              {"stay_in_host", result.state.stay_in_host}};
  }
  document["memory"] = ordered_json::parse(result.memory);
  ordered_json peaks = ordered_json::object();
  for (const Tier tier : all_tiers) {
    const TierAccount& account = result.tier(tier);
    if (account.peak == 0) continue;
    const auto [phase, unit] = phase_and_unit(account);
    ordered_json at_peak = ordered_json::object(), live = ordered_json::array();
    for (const Category category : all_categories) {
      at_peak[std::string(name_of(category))] = account.at_peak[category];
    }
    for (const LiveGroup& group : live_groups(account, [](const std::string& tag) { return tag; })) {
      live.push_back({{"tag", group.tag},
                      {"category", name_of(group.category)},
                      {"count", group.count},
                      {"bytes", group.bytes}});
    }
    peaks[std::string(name_of(tier))] = {{"bytes", account.peak},
                                         {"phase", phase},
                                         {"unit", unit},
                                         {"by_category", std::move(at_peak)},
                                         {"live", std::move(live)}};
  }
  document["peak"] = std::move(peaks);
  document["traffic"] = ordered_json::parse(result.traffic);
  document["traffic_total"] = traffic_count_json(sum_of(result.data));
  const std::optional<OtherGathering>& other = result.other_gathering;
  document["other_gathering"] = other ? ordered_json{{"gather_for", name_of(other->gather_for)},
                                                     {"peak_bytes", other->peak},
                                                     {"elements", other->elements},
                                                     {"bytes", other->bytes}}
                                      : ordered_json(nullptr);
  document["bytes_to_other_nodes"] = {{"bytes", result.crossing_bytes}, {"exact", result.crossing_exact}};
  if (result.node_crossing_bytes) {
    document["bytes_to_other_nodes"]["node_bytes"] = *result.node_crossing_bytes;
  }
  const OffloadTraffic& bytes = result.offload_bytes;
  document["host_device_bytes"] = bytes.to_host + bytes.from_host;
  document["nvme_bytes"] = bytes.nvme_read + bytes.nvme_written;
  document["offload_bytes"] = {{"to_host", bytes.to_host},
                               {"from_host", bytes.from_host},
                               {"nvme_read", bytes.nvme_read},
                               {"nvme_written", bytes.nvme_written}};
  document["offload"] = offload_json(request, result);
  document["model"] = ordered_json::parse(result.model);
  document["work"] = {{"kernels", result.work.kernels},
                      {"floating_point_operations", result.work.floating_point_operations},
                      {"model_operations", result.model_operations},
                      {"tokens", result.tokens}};
  return document;
}

/// For example "optimizer nvme, parameters nvme, host state 1.00 GiB"; empty if everything is on the device.
std::string offload_text(const FitTrial& trial) {
  std::string text;
  if (trial.optimizer != OffloadTier::none) text = fmt::format("optimizer {}", name_of(trial.optimizer));
  if (trial.parameters != OffloadTier::none) {
    text += fmt::format("{}parameters {}", text.empty() ? "" : ", ", name_of(trial.parameters));
  }
  if (trial.activations) text += fmt::format("{}kept inputs of blocks", text.empty() ? "" : ", ");
  const bool nvme = trial.optimizer == OffloadTier::nvme || trial.parameters == OffloadTier::nvme;
  if (nvme && trial.host_state > 0) text += ", host state " + format_bytes(trial.host_state);
  return text;
}

/// A short form: in "cpu/nvme+inputs", cpu is the tier of the optimizer and nvme that of the parameters;
/// "+inputs" stands for checkpointed inputs in host memory.
std::string tiers_text(const FitTrial& trial) {
  if (offload_text(trial).empty()) return "-";
  return fmt::format("{}/{}{}", name_of(trial.optimizer), name_of(trial.parameters),
                     trial.activations ? "+inputs" : "");
}

std::string checkpointing_text(int every) {
  return every == 0 ? "off" : every == 1 ? "every block" : fmt::format("every {}", every);
}

std::string seconds_text(double seconds) {
  return fmt::format("{:.3g}", seconds);
}

}  // namespace

std::string plan_text(const PlanRequest& request, const PlanResult& result, std::int64_t budget) {
  std::string text = model_rows(request, result) + state_rows(request, result) +
                     memory_rows(request, result) + traffic_rows(request, result) +
                     offload_rows(request, result);
  text += beside_what_is_taken(request.host_memory, result.tier(Tier::host).peak,
                               request.device == DeviceKind::cpu ? result.tier(Tier::device).peak : 0);
  const std::vector<std::string> missing = shortages(request, result, budget);
  for (const std::string& line : missing) text += "\n" + line + "\n";
  if (budget > 0 && missing.empty()) {
    text += fmt::format("\nfits in {}: {} are left\n", format_bytes(budget),
                        format_bytes(budget - result.tier(Tier::device).peak));
  }
  return text;
}

std::vector<std::string> shortages(const PlanRequest& request, const PlanResult& result,
                                   std::int64_t budget) {
  std::vector<std::string> lines;
  const auto check = [&](Tier tier, std::int64_t limit, const char* of) {
    const std::int64_t peak = result.tier(tier).peak;
    if (limit == 0 || peak <= limit) return;
    lines.push_back(fmt::format("does not fit in {}{}: {} are missing", format_bytes(limit), of,
                                format_bytes(peak - limit)));
  };
  check(Tier::device, budget, "");
  const std::int64_t host_limit = request.config.offload.host_memory_limit;
  check(Tier::host, host_limit == 0 && budget > 0 ? request.host_memory.bytes : host_limit,
        " of host memory");
  check(Tier::nvme, request.config.offload.nvme_limit, " on nvme");
  return lines;
}

std::string describe(const FitTrial& trial) {
  return fmt::format(
      "stage {}, {} reduction, activation checkpointing {}{}{}, micro-batch {} x {} accumulated", trial.stage,
      name_of(trial.reduction), checkpointing_text(trial.checkpoint_every),
      trial.vocabulary_chunk > 0 ? fmt::format(", head in chunks of {} columns", trial.vocabulary_chunk) : "",
      tiers_text(trial) == "-" ? "" : ", offloaded: " + offload_text(trial), trial.micro_batch,
      trial.accumulation);
}

std::string fit_text(const FitRequest& request, const FitResult& result) {
  const CostModel& rates = request.rates;
  const bool simulated = static_cast<bool>(request.seconds);
  std::string text =
      fmt::format("a rank{} sends {} and computes {}/s", rates.machine.empty() ? "" : " of " + rates.machine,
                  link_speed(rates.network), operations_text(rates.operations));
  const bool offload = std::any_of(result.ladder.begin(), result.ladder.end(),
                                   [](const FitTrial& trial) { return tiers_text(trial) != "-"; });
  if (offload) {
    text += fmt::format(", copies {} to and from the host, updates {:.3g} G parameters/s there",
                        link_speed(rates.host_link), rates.host_update / 1e9);
    if (!request.plan.config.offload.nvme_path.empty()) {
      text += fmt::format(", reads and writes {} on nvme", link_speed(rates.nvme));
    }
  }
  text += fmt::format("; cheapest first, each with the largest micro-batch that fits in {}",
                      format_bytes(request.budget));
  if (request.nvme_budget > 0) text += fmt::format(", {} on nvme", format_bytes(request.nvme_budget));
  if (simulated) {
    text +=
        "\nseconds: the simulated step of what fits, as below; a formula with these rates gives the order, "
        "and "
        "what is not faster with its largest micro-batch is left out";
  }
  text += "\nhost memory: " + describe(request.plan.host_memory) + "\n";
  if (offload)
    text +=
        "offload: where optimizer state and parameters live, +inputs: the kept inputs of blocks on the host; "
        "- is the device\n";
  const auto when = [&](const std::string& cell) { return offload ? cell : std::string(); };
  const auto last = [&](const std::string& cell) {
    return simulated ? fmt::format(" +{:>9}", cell) : std::string();
  };
  text +=
      fmt::format("\n{:>5} {:<12}{:<14}{:<12}{}{:>13}{:>14}{}  {:<6}{:>10} = {:>9} +{:>10} +{:>9}{}{}\n",
                  "stage", "reduction", "checkpointing", "head", when(fmt::format("{:<18}", "offload")),
                  "micro-batch", "peak", when(fmt::format("{:>13}", "host memory")), "fits", "s a step",
                  "computing", "again", "waiting", when(fmt::format(" +{:>9}", "offload")), last("other"));
  for (std::size_t i = 0; i < result.ladder.size(); ++i) {
    const FitTrial& trial = result.ladder[i];
    const auto seconds = [&](double value) { return simulated && !trial.fits ? "-" : seconds_text(value); };
    text += fmt::format(
        "{:>5} {:<12}{:<14}{:<12}{}{:>13}{:>14}{}  {:<6}{:>10} = {:>9} +{:>10} +{:>9}{}{}{}\n", trial.stage,
        name_of(trial.reduction), trial.state_alone ? "any" : checkpointing_text(trial.checkpoint_every),
        trial.state_alone            ? "any"
        : trial.vocabulary_chunk > 0 ? fmt::format("by {}", trial.vocabulary_chunk)
                                     : "whole",
        when(fmt::format("{:<18}", tiers_text(trial))),
        trial.state_alone ? "any" : fmt::format("{} x {}", trial.micro_batch, trial.accumulation),
        (trial.state_alone ? "> " : "") + format_bytes(trial.peak),
        when(fmt::format("{:>13}", trial.state_alone ? "?" : format_bytes(trial.host))),
        trial.fits ? "yes" : "no", seconds(trial.cost.total()), seconds(trial.cost.compute),
        seconds(trial.cost.recompute), seconds(trial.cost.exposed),
        when(fmt::format(" +{:>9}", seconds(trial.cost.offload))), last(seconds(trial.cost.other)),
        i == result.chosen && result.fits ? "  <- chosen" : "");
  }
  const FitTrial& chosen = result.ladder[result.chosen];
  const std::int64_t peak = result.plan.tier(Tier::device).peak;
  if (result.fits) {
    return text +
           fmt::format("\nfits: {}; {} are left\n\n", describe(chosen), format_bytes(request.budget - peak));
  }
  std::string missing;
  const auto beyond = [&](std::int64_t bytes, std::int64_t limit, const char* of) {
    if (limit == 0 || bytes <= limit) return;
    missing += fmt::format("{}{}{}, {} more than is available", missing.empty() ? "" : " and ",
                           format_bytes(bytes), of, format_bytes(bytes - limit));
  };
  beyond(peak, request.budget, "");
  beyond(chosen.host, request.plan.host_memory.bytes, " of host memory");
  beyond(chosen.nvme, request.nvme_budget, " on nvme");
  text +=
      fmt::format("\nnothing fits in {}: the least is {}, and takes {}; give more memory or more ranks\n\n",
                  format_bytes(request.budget), describe(chosen), missing);
  return text;
}

std::string plan_json(const PlanRequest& request, const PlanResult& result, std::int64_t budget) {
  return plan_object(request, result, budget).dump(1) + "\n";
}

std::string fit_json(const FitRequest& request, const FitResult& result) {
  PlanRequest chosen = request.plan;
  chosen.config = result.config;
  chosen.rank = result.rank;
  ordered_json document = plan_object(chosen, result.plan, request.budget);
  document["missing_bytes"] = result.missing;
  document["cost_model"] = rates_json(request.rates);
  ordered_json ladder = ordered_json::array();
  for (std::size_t i = 0; i < result.ladder.size(); ++i) {
    const FitTrial& trial = result.ladder[i];
    const auto seconds = [&](double value) {
      return request.seconds && !trial.fits ? ordered_json(nullptr) : ordered_json(value);
    };
    ladder.push_back({{"stage", trial.stage},
                      {"reduction", name_of(trial.reduction)},
                      {"checkpoint_every", trial.checkpoint_every},
                      {"vocabulary_chunk", trial.vocabulary_chunk},
                      {"micro_batch", trial.micro_batch},
                      {"accumulation", trial.accumulation},
                      {"offload_optimizer", name_of(trial.optimizer)},
                      {"offload_param", name_of(trial.parameters)},
                      {"offload_activations", trial.activations},
                      {"peak_bytes", trial.peak},
                      {"host_bytes", trial.host},
                      {"nvme_bytes", trial.nvme},
                      {"host_state_bytes", std::max<std::int64_t>(trial.host_state, 0)},
                      {"state_alone", trial.state_alone},
                      {"fits", trial.fits},
                      {"seconds", seconds(trial.cost.total())},
                      {"compute_seconds", seconds(trial.cost.compute)},
                      {"recompute_seconds", seconds(trial.cost.recompute)},
                      {"exposed_seconds", seconds(trial.cost.exposed)},
                      {"offload_seconds", seconds(trial.cost.offload)},
                      {"other_seconds", seconds(trial.cost.other)},
                      {"chosen", i == result.chosen && result.fits}});
  }
  document["ladder"] = std::move(ladder);
  return document.dump(1) + "\n";
}

}  // namespace tranche::planner
