#pragma once
/// A machine's rates, measured by `tranche calibrate` or taken from datasheets. They stand in the JSON file
/// that `tranche plan --machine` reads; docs/reference/plan-files.md describes every field.

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

/// Seconds by size (bytes or operations), both ascending. Between two points the table follows a power law.
/// Above the last point seconds are proportional to size. Below the first they follow the line through the
/// first two points, but never fall faster than in proportion.
struct TimeTable {
  std::vector<std::pair<double, double>> points;
  double seconds(double size) const;
};

/// Rates of GEMMs of one dtype and layout over a grid of sizes.
struct ProductTable {
  DataType dtype = DataType::float32;
  std::string layout;               ///< "nn", "nt" (b transposed), or "tn" (a transposed, added to c in fp32)
  std::vector<std::int64_t> sizes;  ///< ascending; the same for m, n and k
  std::vector<double> rates;        ///< operations a second at [m][n][k], row-major
  /// Interpolates in the logarithms; a size outside the grid counts as the size at its edge.
  double rate(double m, double n, double k) const;
};

/// The time of the kernel of this name, without the GEMM that it may contain.
struct KernelTable {
  std::string name;
  DataType dtype = DataType::float32;  ///< the dtype in which the model computes
  std::string by;                      ///< "bytes" (read and written) or "operations"
  TimeTable time;
};

/// The compute rates of one rank while `ranks` ranks of a node compute at once.
struct ComputeShare {
  int ranks = 1;    ///< ranks on the node
  int threads = 1;  ///< threads of each rank
  double launch_seconds = 0;
  double memory_bytes_per_second = 0;
  std::vector<ProductTable> products;
  std::vector<KernelTable> kernels;
};

struct CollectiveTable {
  std::string operation;
  int ranks = 2;
  int element_bytes = 4;
  double cores = 0;  ///< cores of a rank that the operation occupies
  TimeTable time;    ///< by the bytes of all ranks' parts together
};

struct LinkRate {
  double bytes_per_second = 0;
  double latency_seconds = 0;
};

struct Machine {
  std::string name, source;  ///< "measured" or "datasheet"
  std::string taken;         ///< date, version and load of the measurement; may be empty
  DeviceKind device = DeviceKind::cpu;
  int cores = 1;                     ///< cores of a node
  std::vector<ComputeShare> shares;  ///< ascending in ranks
  std::vector<CollectiveTable> collectives;
  LinkRate host_link;                     ///< in each direction
  double host_bytes_per_second = 0;       ///< read plus written by one rank's updates in host memory
  std::optional<LinkRate> disk;           ///< bytes read and written by one rank
  std::optional<LinkRate> network;        ///< rate of one node
  double disk_read_bytes_per_second = 0;  ///< 0: the rate of `disk`
  double disk_cores = 0;                  ///< cores of a CPU node that a transfer claims

  bool measured() const { return source == "measured"; }
  /// The share measured with the largest number of ranks that is at most `ranks`; the smallest share if all
  /// have more.
  const ComputeShare& share(int ranks) const;
};

/// Throws ConfigurationError, which names `origin` and the key, for unknown keys and versions, for missing
/// keys and for impossible values.
Machine parse_machine(std::string_view json, const std::string& origin);
/// Takes a path, or the name of a machine file that is built into the program ("dgx-h100"). Throws
/// ConfigurationError.
Machine load_machine(const std::string& path_or_name);
std::string machine_json(const Machine& machine);

/// Parses "50GB/s,5us": the bytes a second of a node and the latency of a message. Throws ConfigurationError
/// that names `flag`.
LinkRate parse_network(const std::string& text, const char* flag);

}  // namespace tranche::planner
