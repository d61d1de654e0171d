#include "tranche/planner/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/json_node.h"
#include "core/text_file.h"
#include "planner/machine_files.h"
#include "tranche/config/config.h"
#include "tranche/core/error.h"

namespace tranche::planner {

using detail::JsonNode;

namespace {

using nlohmann::ordered_json;

double rate(const JsonNode& node) {
  return node.number(1, 1e21);
}

DataType dtype(const JsonNode& node) {
  return parse_data_type(node.choice({"fp32", "bf16", "fp16"}));
}

TimeTable times(const JsonNode& list) {
  TimeTable table;
  for (const JsonNode& point : list.items(1)) {
    const std::vector<JsonNode> pair = point.items(2, 2);
    const double size = pair[0].number(1e-9, 1e21), taken = pair[1].number(1e-12, 1e6);
    if (!table.points.empty() && size <= table.points.back().first) point.fail("does not ascend in size");
    table.points.emplace_back(size, taken);
  }
  return table;
}

LinkRate read_link(const JsonNode& from) {
  from.allow({"bytes_per_second", "latency_seconds"});
  return {rate(from["bytes_per_second"]), from["latency_seconds"].number(0, 1e4)};
}

ProductTable read_products(const JsonNode& from) {
  from.allow({"dtype", "layout", "sizes", "rates"});
  ProductTable table;
  table.dtype = dtype(from["dtype"]);
  table.layout = from["layout"].choice({"nn", "nt", "tn"});
  constexpr std::size_t most = 1 << 10;  // there are as many rates as the cube of this number
  for (const JsonNode& each : from["sizes"].items(1, most)) {
    table.sizes.push_back(each.integer(1, 1'000'000'000));
    if (table.sizes.size() > 1 && table.sizes.back() <= table.sizes[table.sizes.size() - 2]) {
      each.fail("does not ascend");
    }
  }
  table.rates = from["rates"].numbers(1, 1e21);
  const std::size_t wanted = table.sizes.size() * table.sizes.size() * table.sizes.size();
  if (table.rates.size() != wanted) {
    from["rates"].fail(fmt::format("has {} rates; {} sizes each of m, n and k want {}", table.rates.size(),
                                   table.sizes.size(), wanted));
  }
  return table;
}

ComputeShare read_share(const JsonNode& from) {
  from.allow({"ranks", "threads", "launch_seconds", "memory_bytes_per_second", "products", "kernels"});
  ComputeShare share;
  share.ranks = from["ranks"].integer<int>(1, 1 << 16);
  share.threads = from["threads"].integer<int>(1, 1 << 16);
  share.launch_seconds = from["launch_seconds"].number(0, 1);
  share.memory_bytes_per_second = rate(from["memory_bytes_per_second"]);
  for (const JsonNode& each : from["products"].items(1)) share.products.push_back(read_products(each));
  for (const JsonNode& each : from["kernels"].items()) {
    each.allow({"name", "dtype", "by", "points"});
    share.kernels.push_back({each["name"].name(), dtype(each["dtype"]),
                             each["by"].choice({"bytes", "operations"}), times(each["points"])});
  }
  return share;
}

ordered_json times_json(const TimeTable& table) {
  ordered_json points = ordered_json::array();
  for (const auto& [size, seconds] : table.points) points.push_back({size, seconds});
  return points;
}

ordered_json link_json(const LinkRate& link) {
  return {{"bytes_per_second", link.bytes_per_second}, {"latency_seconds", link.latency_seconds}};
}

}  // namespace

double TimeTable::seconds(double size) const {
  if (points.empty() || !(size > 0)) return points.empty() ? 0.0 : points.front().second;
  const auto& [first, least] = points.front();
  const auto& [last, most] = points.back();
  if (size >= last) return most * size / last;
  const auto slope = [](const auto& a, const auto& b) {
    return std::log(b.second / a.second) / std::log(b.first / a.first);
  };
  if (size <= first) {
    const double power = points.size() > 1 ? std::clamp(slope(points[0], points[1]), 0.0, 1.0) : 1.0;
    return least * std::pow(size / first, power);
  }
  const auto above = std::upper_bound(points.begin(), points.end(), size,
                                      [](double value, const auto& point) { return value < point.first; });
  const auto& below = *(above - 1);
  return below.second * std::pow(size / below.first, slope(below, *above));
}

double ProductTable::rate(double m, double n, double k) const {
  struct Place {
    std::size_t below;
    double share;
  };
  const auto place = [this](double size) -> Place {
    if (sizes.size() == 1 || size <= static_cast<double>(sizes.front())) return {0, 0.0};
    for (std::size_t i = 0; i + 1 < sizes.size(); ++i) {
      const auto low = static_cast<double>(sizes[i]), high = static_cast<double>(sizes[i + 1]);
      if (size < high) return {i, std::log(size / low) / std::log(high / low)};
    }
    return {sizes.size() - 2, 1.0};
  };
  const Place at[3] = {place(m), place(n), place(k)};
  double sum = 0;
  for (int corner = 0; corner < 8; ++corner) {
    double weight = 1;
    std::size_t index = 0;
    for (int axis = 0; axis < 3; ++axis) {
      const bool high = (corner >> axis & 1) != 0;
      weight *= high ? at[axis].share : 1 - at[axis].share;
      index = index * sizes.size() + std::min(at[axis].below + (high ? 1 : 0), sizes.size() - 1);
    }
    if (weight > 0) sum += weight * std::log(rates[index]);
  }
  return std::exp(sum);
}

const ComputeShare& Machine::share(int ranks) const {
  const ComputeShare* best = &shares.front();
  for (const ComputeShare& each : shares) {
    if (each.ranks <= ranks) best = &each;
  }
  return *best;
}

Machine parse_machine(std::string_view json, const std::string& origin) {
  const JsonNode file = JsonNode::read<ConfigurationError>(json, origin);
  if (const std::string schema = file["schema"].text(); schema != machine_schema) {
    file["schema"].fail(
        fmt::format("is '{}', not '{}', of which tranche calibrate writes files "
                    "(docs/reference/plan-files.md)",
                    schema, machine_schema));
  }
  if (const std::int64_t version = file["version"].integer(); version != machine_version) {
    file["version"].fail(
        fmt::format("is {}, which is not known to this program: it reads {}", version, machine_version));
  }
  file.allow({"schema", "version", "name", "source", "taken", "comment", "device", "cores", "shares",
              "collectives", "host_link", "host_bytes_per_second", "disk", "disk_read_bytes_per_second",
              "disk_cores", "network"});
  Machine machine;
  machine.name = file["name"].name();
  machine.source = file["source"].choice({"measured", "datasheet"});
  if (file["taken"]) machine.taken = file["taken"].name();
  machine.device = file["device"].choice({"cpu", "cuda"}) == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
  machine.cores = file["cores"].integer<int>(1, 1 << 20);
  for (const JsonNode& each : file["shares"].items(1)) {
    machine.shares.push_back(read_share(each));
    if (machine.shares.size() > 1 &&
        machine.shares.back().ranks <= machine.shares[machine.shares.size() - 2].ranks) {
      each["ranks"].fail("does not ascend from one share to the next");
    }
  }
  for (const JsonNode& each : file["collectives"].items()) {
    each.allow({"operation", "ranks", "element_bytes", "cores", "points"});
    machine.collectives.push_back(
        {each["operation"].choice({"all_gather", "reduce_scatter", "all_reduce", "broadcast"}),
         each["ranks"].integer<int>(1, 1 << 16), each["element_bytes"].integer<int>(1, 8),
         each["cores"].number(0, 1024), times(each["points"])});
  }
  machine.host_link = read_link(file["host_link"]);
  machine.host_bytes_per_second = rate(file["host_bytes_per_second"]);
  if (file["disk"]) machine.disk = read_link(file["disk"]);
  if (const JsonNode reads = file["disk_read_bytes_per_second"]) {
    machine.disk_read_bytes_per_second = rate(reads);
  }
  if (const JsonNode cores = file["disk_cores"]) machine.disk_cores = cores.number(0, 1024);
  if (file["network"]) machine.network = read_link(file["network"]);
  return machine;
}

Machine load_machine(const std::string& path_or_name) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path_or_name, ignored)) {
    std::vector<std::string_view> names;
    for (const MachineFile& file : machine_files()) {
      if (file.name == path_or_name) return parse_machine(file.json, path_or_name);
      names.push_back(file.name);
    }
    throw ConfigurationError(
        fmt::format("--machine: there is no file '{}'; tranche calibrate makes one, and these come with "
                    "the program: {}",
                    path_or_name, fmt::join(names, ", ")));
  }
  return parse_machine(detail::read_text_file(path_or_name, "--machine"), path_or_name);
}

std::string machine_json(const Machine& machine) {
  ordered_json document;
  document["schema"] = machine_schema;
  document["version"] = machine_version;
  document["name"] = machine.name;
  document["source"] = machine.source;
  if (!machine.taken.empty()) document["taken"] = machine.taken;
  document["device"] = machine.device == DeviceKind::cuda ? "cuda" : "cpu";
  document["cores"] = machine.cores;
  document["shares"] = ordered_json::array();
  for (const ComputeShare& share : machine.shares) {
    ordered_json products = ordered_json::array(), kernels = ordered_json::array();
    for (const ProductTable& table : share.products) {
      products.push_back({{"dtype", name_of(table.dtype)},
                          {"layout", table.layout},
                          {"sizes", table.sizes},
                          {"rates", table.rates}});
    }
    for (const KernelTable& table : share.kernels) {
      kernels.push_back({{"name", table.name},
                         {"dtype", name_of(table.dtype)},
                         {"by", table.by},
                         {"points", times_json(table.time)}});
    }
    document["shares"].push_back({{"ranks", share.ranks},
                                  {"threads", share.threads},
                                  {"launch_seconds", share.launch_seconds},
                                  {"memory_bytes_per_second", share.memory_bytes_per_second},
                                  {"products", std::move(products)},
                                  {"kernels", std::move(kernels)}});
  }
  document["collectives"] = ordered_json::array();
  for (const CollectiveTable& table : machine.collectives) {
    document["collectives"].push_back({{"operation", table.operation},
                                       {"ranks", table.ranks},
                                       {"element_bytes", table.element_bytes},
                                       {"cores", table.cores},
                                       {"points", times_json(table.time)}});
  }
  document["host_link"] = link_json(machine.host_link);
  document["host_bytes_per_second"] = machine.host_bytes_per_second;
  document["disk"] = machine.disk ? link_json(*machine.disk) : ordered_json(nullptr);
  if (machine.disk_read_bytes_per_second > 0) {
    document["disk_read_bytes_per_second"] = machine.disk_read_bytes_per_second;
  }
  if (machine.disk_cores > 0) document["disk_cores"] = machine.disk_cores;
  document["network"] = machine.network ? link_json(*machine.network) : ordered_json(nullptr);
  return document.dump(1) + "\n";
}

LinkRate parse_network(const std::string& text, const char* flag) {
  const auto refuse = [&]() -> LinkRate {
    throw ConfigurationError(
        fmt::format("{} '{}' is not RATE,LATENCY like 50GB/s,5us: bytes a second of a node, and ns, us, ms "
                    "or s of a message",
                    flag, text));
  };
  const std::size_t comma = text.find(',');
  if (comma == std::string::npos) return refuse();
  std::string rate = text.substr(0, comma);
  if (rate.ends_with("/s")) rate.resize(rate.size() - 2);
  LinkRate link;
  try {
    link.bytes_per_second = static_cast<double>(parse_byte_size(rate));
  } catch (const ConfigurationError&) {
    return refuse();
  }
  char* end = nullptr;
  const std::string latency = text.substr(comma + 1);
  const double value = std::strtod(latency.c_str(), &end);
  const std::string unit(end);
  const double scale = unit == "ns"   ? 1e-9
                       : unit == "us" ? 1e-6
                       : unit == "ms" ? 1e-3
                       : unit == "s"  ? 1.0
                                      : 0.0;
  if (end == latency.c_str() || scale == 0 || !std::isfinite(value) || value < 0 ||
      !(link.bytes_per_second >= 1))
    return refuse();
  link.latency_seconds = value * scale;
  return link;
}

}  // namespace tranche::planner
