#include "tranche/planner/machine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "planner/machine_files.h"
#include "tests/tools/program_fixture.h"
#include "tranche/core/error.h"

namespace tranche::planner {
namespace {

using namespace tools;  // for the program, which runs what is planned

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using tools::test::message_of;

json example() {
  return json::parse(R"({
    "schema": "tranche.machine", "version": 1, "name": "example", "source": "measured", "taken": "now",
    "device": "cpu", "cores": 4,
    "shares": [{"ranks": 1, "threads": 4, "launch_seconds": 1e-6, "memory_bytes_per_second": 2e10,
                "products": [{"dtype": "fp32", "layout": "nn", "sizes": [10, 1000],
                              "rates": [1e9, 2e9, 2e9, 4e9, 2e9, 4e9, 4e9, 8e9]}],
                "kernels": [{"name": "gelu_forward", "dtype": "fp32", "by": "bytes",
                             "points": [[100, 1e-6], [10000, 1e-4]]}]}],
    "collectives": [{"operation": "all_gather", "ranks": 2, "element_bytes": 4, "cores": 0.5,
                     "points": [[1000, 1e-5], [100000, 1e-4]]}],
    "host_link": {"bytes_per_second": 1e10, "latency_seconds": 1e-5},
    "host_bytes_per_second": 1e10,
    "disk": {"bytes_per_second": 1e9, "latency_seconds": 1e-4},
    "network": null})");
}

std::string error_of(const json& document) {
  return message_of<ConfigurationError>([&] { (void)parse_machine(document.dump(), "m.json"); });
}

TEST(Machine, TimesAreInterpolated) {
  const TimeTable table{{{100, 1e-5}, {10000, 1e-4}}};
  EXPECT_DOUBLE_EQ(table.seconds(100), 1e-5);
  EXPECT_NEAR(table.seconds(1000), std::sqrt(1e-5 * 1e-4), 1e-12);
  EXPECT_DOUBLE_EQ(table.seconds(20000), 2e-4);
  EXPECT_NEAR(table.seconds(1), 1e-6, 1e-12);  // the first slope, one half, continues below
  EXPECT_EQ((TimeTable{{{100, 2.0}, {200, 1.0}}}).seconds(50), 2.0) << "never slower than what is larger";
}

TEST(Machine, RatesAreInterpolatedOverThreeSizes) {
  const Machine machine = parse_machine(example().dump(), "m.json");
  const ProductTable& table = machine.shares[0].products[0];
  EXPECT_NEAR(table.rate(10, 10, 10), 1e9, 1);
  EXPECT_NEAR(table.rate(1000, 10, 10), 2e9, 1);  // m is the slowest index
  EXPECT_NEAR(table.rate(100, 100, 100), std::sqrt(1e9 * 8e9), 10);
  EXPECT_NEAR(table.rate(1e6, 1e6, 1e6), 8e9, 10);
  EXPECT_NEAR(table.rate(1, 1, 1), 1e9, 10);
}

TEST(Machine, WritesWhatItReads) {
  const Machine machine = parse_machine(example().dump(), "m.json");
  EXPECT_TRUE(machine.measured());
  EXPECT_FALSE(machine.network.has_value());
  EXPECT_EQ(machine.disk->bytes_per_second, 1e9);
  const std::string text = machine_json(machine);
  EXPECT_EQ(machine_json(parse_machine(text, "again")), text);
  EXPECT_EQ(json::parse(text), example());

  json with_cores = example();
  with_cores["disk_cores"] = 0.5;
  EXPECT_EQ(json::parse(machine_json(parse_machine(with_cores.dump(), "m.json"))), with_cores);
}

TEST(Machine, ErrorsNameFileAndKey) {
  EXPECT_THAT(message_of<ConfigurationError>([] { (void)parse_machine("{", "m.json"); }),
              HasSubstr("m.json is not JSON: line 1, column 2"));
  json broken = example();
  broken["version"] = 7;
  EXPECT_THAT(error_of(broken),
              HasSubstr("m.json: version is 7, which is not known to this program: it reads 1"));
  broken = example();
  broken.erase("host_link");
  EXPECT_THAT(error_of(broken), HasSubstr("m.json: host_link is missing"));
  broken = example();
  broken["shares"][0]["memory_bytes_per_second"] = -3;
  EXPECT_THAT(error_of(broken),
              HasSubstr("m.json: shares[0].memory_bytes_per_second is -3, which cannot be: from 1"));
  broken = example();
  broken["shares"][0]["products"][0]["rates"].erase(0);
  EXPECT_THAT(error_of(broken),
              HasSubstr("shares[0].products[0].rates has 7 rates; 2 sizes each of m, n and k want 8"));
  broken = example();
  broken["shares"][0]["products"][0]["sizes"] = {1000, 1000};
  EXPECT_THAT(error_of(broken), HasSubstr("shares[0].products[0].sizes[1] does not ascend"));
  broken = example();
  broken["shares"][0]["kernels"][0]["points"] = {{200, 1e-6}, {100, 1e-4}};
  EXPECT_THAT(error_of(broken), HasSubstr("shares[0].kernels[0].points[1] does not ascend in size"));
  broken = example();
  broken["collectives"][0]["operation"] = "all_togather";
  EXPECT_THAT(
      error_of(broken),
      HasSubstr(
          "collectives[0].operation is 'all_togather'; known are all_gather, reduce_scatter, all_reduce and "
          "broadcast; did you mean 'all_gather'?"));
  broken = example();
  broken["collectives"][0]["points"][0][1] = "fast";
  EXPECT_THAT(error_of(broken), HasSubstr("collectives[0].points[0][1] is not a number: \"fast\""));
  broken = example();
  broken["source"] = "guessed";
  EXPECT_THAT(error_of(broken), HasSubstr("source is 'guessed'; known are measured and datasheet"));
  broken = example();
  broken["cores"] = 1.5;
  EXPECT_THAT(error_of(broken), HasSubstr("cores is not an integer: 1.5"));
  broken = example();
  broken["ram"] = 1;
  EXPECT_THAT(error_of(broken), HasSubstr("m.json: ram is an unknown key; known are schema, version"));
  broken = example();
  broken["shares"].push_back(broken["shares"][0]);
  EXPECT_THAT(error_of(broken), HasSubstr("shares[1].ranks does not ascend from one share to the next"));
}

TEST(Machine, ThoseThatComeWithTheProgramAreOfDatasheets) {
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(TRANCHE_MACHINES)) {
    if (entry.path().extension() != ".json") continue;
    const std::string name = entry.path().stem().string();
    const auto all = machine_files();
    const auto found =
        std::find_if(all.begin(), all.end(), [&](const MachineFile& each) { return each.name == name; });
    ASSERT_NE(found, all.end()) << name;
    std::ifstream file(entry.path());
    EXPECT_EQ(found->json, std::string(std::istreambuf_iterator<char>(file), {})) << name;
    const Machine machine = load_machine(name);
    EXPECT_EQ(machine.source, "datasheet") << name;
    EXPECT_TRUE(machine.network && machine.disk) << name;
    ++files;
  }
  EXPECT_EQ(files, machine_files().size());
  EXPECT_GE(files, 5u);
  EXPECT_THAT(
      message_of<ConfigurationError>([] { (void)load_machine("dgx-z"); }),
      AllOf(HasSubstr("there is no file 'dgx-z'"), HasSubstr("tranche calibrate"), HasSubstr("dgx-h100")));
}

TEST(Machine, NetworksAreRateAndLatency) {
  const LinkRate link = parse_network("50GB/s,5us", "--network");
  EXPECT_EQ(link.bytes_per_second, 50e9);
  EXPECT_DOUBLE_EQ(link.latency_seconds, 5e-6);
  EXPECT_DOUBLE_EQ(parse_network("1e9,2ms", "--network").latency_seconds, 2e-3);
  for (const char* bad :
       {"50GB/s", "50GB/s,5", "fast,5us", "50GB/s,-5us", "50GB/s,us", "0,5us", "1,infs", "1,nanus"}) {
    EXPECT_THAT(message_of<ConfigurationError>([&] { (void)parse_network(bad, "--network"); }),
                HasSubstr("is not RATE,LATENCY like 50GB/s,5us"))
        << bad;
  }
}

TEST(Machine, TheNearestMeasuredShareIsTaken) {
  Machine machine;
  machine.shares = {{.ranks = 2, .products = {}, .kernels = {}}, {.ranks = 4, .products = {}, .kernels = {}}};
  EXPECT_EQ(machine.share(1).ranks, 2);
  EXPECT_EQ(machine.share(3).ranks, 2);
  EXPECT_EQ(machine.share(64).ranks, 4);
}

}  // namespace
}  // namespace tranche::planner
