// A machine's description, and the short form of its network.

#include <cmath>

#include "planner/machine_files.h"
#include "tests/fuzz/fuzz_target.h"
#include "tranche/config/config.h"
#include "tranche/planner/machine.h"

namespace tranche::fuzz {

namespace {

void read_machine(std::string_view input) {
  const planner::Machine machine = planner::parse_machine(input, "machine.json");
  const std::string text = planner::machine_json(machine);
  require(planner::machine_json(planner::parse_machine(text, "again")) == text,
          "a machine's description changes when it is written");
  const planner::ComputeShare& share = machine.share(3);
  for (const double size : {0.0, 1.0, 1e3, 1e12}) {
    for (const auto& table : share.products) require(table.rate(size, 7, 100) > 0, "a product has no rate");
    for (const auto& table : share.kernels) (void)table.time.seconds(size);
    for (const auto& table : machine.collectives) (void)table.time.seconds(size);
  }
}

std::vector<std::string> machine_seeds() {
  std::vector<std::string> seeds;
  for (const planner::MachineFile& file : planner::machine_files()) seeds.emplace_back(file.json);
  return seeds;
}

void read_network(std::string_view input) {
  const planner::LinkRate link = planner::parse_network(std::string(input), "--network");
  require(link.bytes_per_second >= 1 && link.latency_seconds >= 0, "a network's figures are none");
  (void)parse_byte_size(input.substr(0, input.find(',')));
}

std::vector<std::string> network_seeds() {
  return {"50GB,5us", "12.5GB/s,1.5ms", "1e9,0s", "800KiB/s,30ns"};
}

}  // namespace

Target machine_target() {
  return {"machine", read_machine, machine_seeds, {ExitStatus::configuration}};
}
Target network_target() {
  return {"network", read_network, network_seeds, {ExitStatus::configuration}};
}

}  // namespace tranche::fuzz
