#pragma once
/// A machine's rates, measured by `tranche calibrate` or taken from datasheets: the JSON file that
/// `tranche plan --machine` reads. docs/reference/plan-files.md has every field.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tranche/core/dtype.h"
#include "tranche/device/stream.h"

namespace tranche::planner {

inline constexpr std::string_view machine_schema = "tranche.machine";
inline constexpr int machine_version = 1;

/// Seconds by size (bytes or operations), both ascending: between points a power law, above the last in
/// proportion, below the first along the first two (but never faster than in proportion).
struct TimeTable {
  std::vector<std::pair<double, double>> points;
  double seconds(double size) const;
};

/// Rates of GEMMs of one dtype and layout over a grid of sizes.
struct ProductTable {
  DataType dtype = DataType::float32;
  std::string layout;               ///< "nn", "nt" (b transposed), "tn" (a transposed, c in fp32 added to)
  std::vector<std::int64_t> sizes;  ///< ascending; of m, n and k alike
  std::vector<double> rates;        ///< operations a second at [m][n][k], row-major
  /// Interpolated in the logarithms; sizes beyond the grid are taken at its edge.
  double rate(double m, double n, double k) const;
};

/// A kernel by its name, beside the GEMM in it.
struct KernelTable {
  std::string name;
  DataType dtype = DataType::float32;  ///< that the model computes in
  std::string by;                      ///< "bytes" read and written, or "operations"
  TimeTable time;
};

/// A rank's compute rates while so many ranks of a node work at once.
struct ComputeShare {
  int ranks = 1;    ///< of the node
  int threads = 1;  ///< of each
  double launch_seconds = 0;
  double memory_bytes_per_second = 0;
  std::vector<ProductTable> products;
  std::vector<KernelTable> kernels;
};

struct CollectiveTable {
  std::string operation;
  int ranks = 2;
  int element_bytes = 4;
  double cores = 0;  ///< of a rank that the operation keeps busy
  TimeTable time;    ///< by bytes of all ranks' parts together
};

struct LinkRate {
  double bytes_per_second = 0;
  double latency_seconds = 0;
};

struct Machine {
  std::string name, source;  ///< "measured" or "datasheet"
  std::string taken;         ///< when, by what version and under what load; may be empty
  DeviceKind device = DeviceKind::cpu;
  int cores = 1;                     ///< of a node
  std::vector<ComputeShare> shares;  ///< ascending in ranks
  std::vector<CollectiveTable> collectives;
  LinkRate host_link;                     ///< each way
  double host_bytes_per_second = 0;       ///< read plus written by one rank's updates in host memory
  std::optional<LinkRate> disk;           ///< bytes read and written, of a rank
  std::optional<LinkRate> network;        ///< of a node
  double disk_read_bytes_per_second = 0;  ///< 0: as `disk`

  bool measured() const { return source == "measured"; }
  /// The share for so many ranks a node: the nearest that was measured, the lower of two.
  const ComputeShare& share(int ranks) const;
};

/// Throws ConfigurationError naming `origin` and the key: unknown keys and versions, what is missing, values
/// that no machine has.
Machine parse_machine(std::string_view json, const std::string& origin);
/// `path`, or the name of a machine file that is part of the program ("dgx-h100"). Throws
/// ConfigurationError.
Machine load_machine(const std::string& path_or_name);
std::string machine_json(const Machine& machine);

/// "50GB/s,5us": bytes a second of a node and latency of a message. Throws ConfigurationError naming `flag`.
LinkRate parse_network(const std::string& text, const char* flag);

}  // namespace tranche::planner
