#include "tools/info.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/format.h"
#include "device/cuda_probe.h"
#include "tools/plan/mesh_json.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/device/device.h"
#include "tranche/kernels/matmul.h"
#include "tranche/version.h"

namespace tranche::tools {

using nlohmann::ordered_json;

namespace {

ordered_json cuda_json() {
  const detail::CudaProbe probe = detail::probe_cuda();
  ordered_json devices = ordered_json::array();
  for (const detail::CudaDeviceInfo& device : probe.devices) {
    devices.push_back(
        {{"name", device.name},
         {"compute_capability", fmt::format("{}.{}", device.compute_major, device.compute_minor)},
         {"memory_bytes", device.memory_bytes},
         {"multiprocessors", device.multiprocessors}});
  }
  return {{"compiled", probe.compiled},
          {"emulated", probe.emulated},
          {"runtime_version", probe.runtime_version},
          {"driver_version", probe.driver_version},
          {"devices", devices},
          {"problem", probe.problem}};
}

/// The CPU features that kernels and their libraries use.
std::string cpu_features() {
  std::string features;
#if defined(__x86_64__)
  const auto add = [&features](const char* name, bool present) {
    if (!present) return;
    if (!features.empty()) features += ' ';
    features += name;
  };
  add("avx2", __builtin_cpu_supports("avx2") != 0);
  add("fma", __builtin_cpu_supports("fma") != 0);
  add("avx512f", __builtin_cpu_supports("avx512f") != 0);
  add("avx512vnni", __builtin_cpu_supports("avx512vnni") != 0);
  add("avx512bf16", __builtin_cpu_supports("avx512bf16") != 0);
#endif
  return features.empty() ? "baseline" : features;
}

/// Returns the result of `ask`, or its error: a missing library becomes a line of the table, and the rest is
/// still printed.
template <class Ask>
std::string told(const Ask& ask) {
  try {
    return std::string(ask());
  } catch (const Error& error) {
    std::string text = error.message();
    std::replace(text.begin(), text.end(), '\n', ' ');
    return "unavailable: " + text;
  }
}

ordered_json info_json() {
  ordered_json paths = ordered_json::object();
  for (const DataType dtype : {DataType::float32, DataType::bfloat16, DataType::float16}) {
    paths[std::string(name_of(dtype))] = told([&] { return kernels::matmul_path(DeviceKind::cpu, dtype); });
  }
  return {{"version", version},
          {"build_type", TRANCHE_BUILD_TYPE},
          {"compiler", TRANCHE_COMPILER},
          {"mpi", mpi_version()},
          {"hdf5", checkpoint::hdf5_version()},
          {"nccl", TRANCHE_HAS_NCCL ? "compiled" : "not compiled"},
          {"cuda", cuda_json()},
          {"libraries", told([] { return kernels::matmul_libraries(DeviceKind::cpu); })},
          {"cpu", cpu_features()},
          {"matmul", paths},
          {"threads", make_device({DeviceKind::cpu, 0, 0})->threads()}};
}

}  // namespace

std::string info_text(bool json, const std::optional<Mesh>& mesh) {
  ordered_json info = info_json();
  if (mesh) info["mesh"] = mesh_json(*mesh);
  if (json) return info.dump(2) + "\n";
  const auto text = [&](const char* key) { return info[key].get<std::string>(); };
  std::string table;
  const auto row = [&table](std::string_view name, const std::string& value) {
    table += fmt::format("{:<16} {}\n", name, value);
  };
  row("tranche", text("version"));
  row("build", fmt::format("{}, {}", text("build_type"), text("compiler")));
  row("MPI", text("mpi"));
  const ordered_json& cuda = info["cuda"];
  if (cuda["devices"].empty()) {
    row("CUDA",
        cuda["compiled"].get<bool>() ? "compiled; " + cuda["problem"].get<std::string>() : "not compiled");
  }
  for (const ordered_json& device : cuda["devices"]) {
    row("CUDA", fmt::format("{}, compute capability {}, {:.0f} GiB{}", device["name"].get<std::string>(),
                            device["compute_capability"].get<std::string>(),
                            device["memory_bytes"].get<double>() / (1 << 30),
                            cuda["emulated"].get<bool>() ? " (on the CPU, for tests)" : ""));
  }
  row("NCCL", text("nccl"));
  row("HDF5", text("hdf5"));
  row("matmul by", text("libraries"));
  for (const auto& [dtype, path] : info["matmul"].items()) row("  " + dtype, path.get<std::string>());
  row("CPU", text("cpu"));
  row("threads", fmt::format("{}", info["threads"].get<int>()));
  if (mesh) row("mesh", mesh->to_string());
  for (int rank = 0; mesh && rank < mesh->ranks(); ++rank) {
    row(fmt::format("  rank {}", rank), mesh->describe(rank));
  }
  return table;
}

}  // namespace tranche::tools
