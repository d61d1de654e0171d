#include "tranche/planner/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json.hpp>

#include "core/json.h"
#include "core/relaxed_json.h"
#include "core/text_file.h"
#include "planner/machine_files.h"
#include "tranche/core/error.h"
#include "tranche/engine/config.h"

namespace tranche::planner {

namespace {

using nlohmann::ordered_json;

/// An object of the file, with its place in it.
class Reader {
 public:
  Reader(const ordered_json& object, std::string origin, std::string at)
      : object_(object), origin_(std::move(origin)), at_(std::move(at)) {
    if (!object_.is_object()) fail(at_.empty() ? "the file" : at_, "an object is wanted");
  }

  void allow(std::initializer_list<std::string_view> keys) const {
    for (const auto& [key, value] : object_.items()) {
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) fail(place(key), "unknown key");
    }
  }
  bool has(const std::string& key) const { return object_.contains(key) && !object_.at(key).is_null(); }
  const ordered_json& get(const std::string& key) const {
    if (!has(key)) fail(place(key), "is missing");
    return object_.at(key);
  }
  std::string text(const std::string& key) const {
    const ordered_json& value = get(key);
    if (!value.is_string() || value.get<std::string>().empty()) fail(place(key), "a text is wanted");
    return value.get<std::string>();
  }
  std::string text_or_none(const std::string& key) const { return has(key) ? text(key) : std::string(); }
  double number(const std::string& key, double least, double most) const {
    return checked(get(key), place(key), least, most);
  }
  double rate(const std::string& key) const { return number(key, 1, 1e21); }
  double seconds(const std::string& key) const { return number(key, 0, 1e4); }
  int count(const std::string& key, int most) const {
    const double value = number(key, 1, most);
    if (value != std::floor(value)) fail(place(key), fmt::format("{} is no whole number", value));
    return static_cast<int>(value);
  }
  DataType dtype(const std::string& key) const {
    const std::string name = text(key);
    for (const DataType each : {DataType::float32, DataType::bfloat16, DataType::float16}) {
      if (name == name_of(each)) return each;
    }
    fail(place(key), fmt::format("'{}' is not one of fp32, bf16, fp16", name));
  }
  std::string choice(const std::string& key, std::initializer_list<std::string_view> choices) const {
    std::string value = text(key);
    if (std::find(choices.begin(), choices.end(), value) != choices.end()) return value;
    std::string names;
    for (const std::string_view each : choices) names += (names.empty() ? "" : ", ") + std::string(each);
    fail(place(key), fmt::format("'{}' is not one of {}", value, names));
  }
  std::vector<Reader> objects(const std::string& key) const {
    const ordered_json& list = get(key);
    if (!list.is_array()) fail(place(key), "a list is wanted");
    std::vector<Reader> readers;
    for (std::size_t i = 0; i < list.size(); ++i) {
      readers.emplace_back(list[i], origin_, fmt::format("{}[{}]", place(key), i));
    }
    return readers;
  }
  Reader object(const std::string& key) const { return {get(key), origin_, place(key)}; }
  std::vector<double> numbers(const std::string& key, double least, double most) const {
    const ordered_json& list = get(key);
    if (!list.is_array() || list.empty()) fail(place(key), "a list of numbers is wanted");
    std::vector<double> values;
    for (std::size_t i = 0; i < list.size(); ++i) {
      values.push_back(checked(list[i], fmt::format("{}[{}]", place(key), i), least, most));
    }
    return values;
  }
  TimeTable times(const std::string& key) const {
    const ordered_json& list = get(key);
    if (!list.is_array() || list.empty()) fail(place(key), "a list of [size, seconds] is wanted");
    TimeTable table;
    for (std::size_t i = 0; i < list.size(); ++i) {
      const std::string where = fmt::format("{}[{}]", place(key), i);
      if (!list[i].is_array() || list[i].size() != 2) fail(where, "[size, seconds] is wanted");
      const double size = checked(list[i][0], where + "[0]", 1e-9, 1e21);
      const double taken = checked(list[i][1], where + "[1]", 1e-12, 1e6);
      if (i > 0 && size <= table.points.back().first) fail(where, "sizes must ascend");
      table.points.emplace_back(size, taken);
    }
    return table;
  }
  [[noreturn]] void fail(const std::string& where, const std::string& what) const {
    throw ConfigurationError(fmt::format("{}: {}: {}", origin_, where, what));
  }
  std::string place(const std::string& key) const { return at_.empty() ? key : at_ + "." + key; }

 private:
  double checked(const ordered_json& value, const std::string& where, double least, double most) const {
    if (!value.is_number()) fail(where, "a number is wanted");
    const double number = value.get<double>();
    if (!(number >= least && number <= most)) {
      fail(where, fmt::format("{:g} is not between {:g} and {:g}", number, least, most));
    }
    return number;
  }

  const ordered_json& object_;
  std::string origin_, at_;
};

LinkRate read_link(const Reader& from) {
  from.allow({"bytes_per_second", "latency_seconds"});
  return {from.rate("bytes_per_second"), from.seconds("latency_seconds")};
}

ComputeShare read_share(const Reader& from) {
  from.allow({"ranks", "threads", "launch_seconds", "memory_bytes_per_second", "products", "kernels"});
  ComputeShare share;
  share.ranks = from.count("ranks", 1 << 16);
  share.threads = from.count("threads", 1 << 16);
  share.launch_seconds = from.number("launch_seconds", 0, 1);
  share.memory_bytes_per_second = from.rate("memory_bytes_per_second");
  for (const Reader& each : from.objects("products")) {
    each.allow({"dtype", "layout", "sizes", "rates"});
    ProductTable table;
    table.dtype = each.dtype("dtype");
    table.layout = each.choice("layout", {"nn", "nt", "tn"});
    for (const double size : each.numbers("sizes", 1, 1e9)) {
      if (!table.sizes.empty() && size <= static_cast<double>(table.sizes.back())) {
        each.fail(each.place("sizes"), "sizes must ascend");
      }
      table.sizes.push_back(static_cast<std::int64_t>(size));
    }
    constexpr std::size_t most = 1 << 10;  // its cube is a size, too
    if (table.sizes.size() > most) {
      each.fail(each.place("sizes"),
                fmt::format("there are {}, but at most {} are read", table.sizes.size(), most));
    }
    table.rates = each.numbers("rates", 1, 1e21);
    const std::size_t wanted = table.sizes.size() * table.sizes.size() * table.sizes.size();
    if (table.rates.size() != wanted) {
      each.fail(each.place("rates"), fmt::format("{} rates; {} sizes each of m, n and k want {}",
                                                 table.rates.size(), table.sizes.size(), wanted));
    }
    share.products.push_back(std::move(table));
  }
  if (share.products.empty()) from.fail(from.place("products"), "at least one table is wanted");
  for (const Reader& each : from.objects("kernels")) {
    each.allow({"name", "dtype", "by", "points"});
    share.kernels.push_back({each.text("name"), each.dtype("dtype"),
                             each.choice("by", {"bytes", "operations"}), each.times("points")});
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
  JsonRemarks remarks;
  const ordered_json document = parse_json(json, &remarks);
  if (document.is_discarded())
    throw ConfigurationError(
        fmt::format("{}: this is not JSON; a machine's description is, as tranche calibrate writes it "
                    "(docs/projection.md): {}: {}",
                    origin, place_in(json, remarks.byte), remarks.problem));
  const Reader file(document, origin, "");
  if (file.text("schema") != machine_schema) {
    file.fail("schema", fmt::format("'{}' is not '{}'", file.text("schema"), machine_schema));
  }
  const double version = file.number("version", 0, 1e9);
  if (version != machine_version) {
    file.fail("version",
              fmt::format("{:g} is not known to this program, which reads {}", version, machine_version));
  }
  file.allow({"schema", "version", "name", "source", "taken", "comment", "device", "cores", "shares",
              "collectives", "host_link", "host_bytes_per_second", "disk", "disk_read_bytes_per_second",
              "network"});
  Machine machine;
  machine.name = file.text("name");
  machine.source = file.choice("source", {"measured", "datasheet"});
  machine.taken = file.text_or_none("taken");
  machine.device = file.choice("device", {"cpu", "cuda"}) == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
  machine.cores = file.count("cores", 1 << 20);
  for (const Reader& each : file.objects("shares")) {
    machine.shares.push_back(read_share(each));
    if (machine.shares.size() > 1 &&
        machine.shares.back().ranks <= machine.shares[machine.shares.size() - 2].ranks) {
      each.fail(each.place("ranks"), "shares must ascend in ranks");
    }
  }
  if (machine.shares.empty()) file.fail("shares", "at least one is wanted");
  for (const Reader& each : file.objects("collectives")) {
    each.allow({"operation", "ranks", "element_bytes", "cores", "points"});
    machine.collectives.push_back(
        {each.choice("operation", {"all_gather", "reduce_scatter", "all_reduce", "broadcast"}),
         each.count("ranks", 1 << 16), each.count("element_bytes", 8), each.number("cores", 0, 1024),
         each.times("points")});
  }
  machine.host_link = read_link(file.object("host_link"));
  machine.host_bytes_per_second = file.rate("host_bytes_per_second");
  if (file.has("disk")) machine.disk = read_link(file.object("disk"));
  if (file.has("disk_read_bytes_per_second")) {
    machine.disk_read_bytes_per_second = file.rate("disk_read_bytes_per_second");
  }
  if (file.has("network")) machine.network = read_link(file.object("network"));
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
  return parse_machine(read_text_file(path_or_name, "--machine"), path_or_name);
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
