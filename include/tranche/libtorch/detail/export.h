#pragma once
/// Exports of weights and buffers in the formats of other programs.

#include <torch/torch.h>

#include <cstdio>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "tranche/engine/engine.h"
#include "tranche/libtorch/detail/tensors.h"
#include "tranche/libtorch/detail/unit_state.h"

namespace tranche::libtorch::detail {

/// Collective. Calls `write` on rank 0 only, where it must not use collectives; all ranks throw what it
/// throws.
inline void on_rank_0(Runtime& runtime, const std::string& path, const std::string& failure) {
  std::int64_t failed = failure.empty() ? 0 : 1;
  runtime.all()
      .all_reduce(&failed, 1, DataType::int64, ReduceOperation::sum,
                  OperationLabel{"export", "save", Traffic::control, Tier::host})
      .wait();
  if (failed == 0) return;
  throw IoError("cannot write " + path + ": " + (failure.empty() ? "rank 0 failed to" : failure), 0);
}

inline std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

inline std::string safetensors_dtype(at::ScalarType type, const std::string& name) {
  switch (type) {
    case at::kFloat:
      return "F32";
    case at::kDouble:
      return "F64";
    case at::kBFloat16:
      return "BF16";
    case at::kHalf:
      return "F16";
    case at::kInt:
      return "I32";
    case at::kLong:
      return "I64";
    case at::kByte:
      return "U8";
    case at::kBool:
      return "BOOL";
    default:
      throw InvalidArgument("buffer " + name + " has a dtype that the file does not hold");
  }
}

/// Collective. Writes one tensor at a time. The file has 8 bytes with the header's length, a JSON header, and
/// the data.
inline void write_safetensors(Engine& engine, const torch::nn::Module& model,
                              const std::deque<UnitState>& units, const std::string& path) {
  struct Entry {
    std::string name;
    at::Tensor buffer;  ///< undefined for a weight
  };
  std::vector<Entry> entries;
  std::string header = "{\"__metadata__\":{\"format\":\"pt\"}";
  std::int64_t end = 0;
  const auto add = [&](const std::string& name, const std::string& dtype, at::IntArrayRef sizes,
                       std::int64_t bytes) {
    header += "," + quoted(name) + ":{\"dtype\":\"" + dtype + "\",\"shape\":[";
    for (std::size_t i = 0; i < sizes.size(); ++i) header += (i > 0 ? "," : "") + std::to_string(sizes[i]);
    header += "],\"data_offsets\":[" + std::to_string(end) + "," + std::to_string(end + bytes) + "]}";
    end += bytes;
  };
  for (const UnitState& unit : units) {
    for (const Parameter& p : unit.parameters()) {
      add(p.name, "F32", p.tensor.sizes(), p.tensor.numel() * 4);
      entries.push_back({p.name, {}});
    }
  }
  for (const auto& item : model.named_buffers()) {
    if (!item.value().defined()) continue;
    const at::Tensor values = item.value().detach().to(at::kCPU).contiguous();
    add(item.key(), safetensors_dtype(values.scalar_type(), item.key()), values.sizes(),
        static_cast<std::int64_t>(values.nbytes()));
    entries.push_back({item.key(), values});
  }
  header += "}";
  header.append((8 - header.size() % 8) % 8, ' ');

  const bool writes = engine.runtime().rank() == 0;
  const std::string partial = path + ".partial";
  std::ofstream file;
  if (writes) {
    file.open(partial, std::ios::binary | std::ios::trunc);
    std::uint64_t length = header.size();
    char bytes[8];
    for (char& byte : bytes) byte = static_cast<char>(length & 0xff), length >>= 8;
    file.write(bytes, 8);
    file.write(header.data(), static_cast<std::streamsize>(header.size()));
  }
  for (const Entry& entry : entries) {
    if (entry.buffer.defined()) {
      if (writes) {
        file.write(static_cast<const char*>(entry.buffer.data_ptr()),
                   static_cast<std::streamsize>(entry.buffer.nbytes()));
      }
      continue;
    }
    const std::vector<float> weight = engine.read_weight(entry.name);  // little-endian, like all supported
                                                                       // machines
    if (writes) {
      file.write(reinterpret_cast<const char*>(weight.data()),
                 static_cast<std::streamsize>(weight.size() * 4));
    }
  }
  std::string failure;
  if (writes) {
    file.close();
    if (!file || std::rename(partial.c_str(), path.c_str()) != 0) {
      failure = std::strerror(errno);
      std::remove(partial.c_str());
    }
  }
  on_rank_0(engine.runtime(), path, failure);
}

/// Collective. On rank 0 the parameters have whole fp32 values while torch::save runs.
inline void write_archive(Engine& engine, torch::nn::Module& model, std::deque<UnitState>& units,
                          const std::string& path) {
  const bool writes = engine.runtime().rank() == 0;
  std::vector<std::pair<at::Tensor, at::Tensor>> before;
  for (UnitState& unit : units) {
    for (Parameter& p : unit.parameters()) {
      const std::vector<float> weight = engine.read_weight(p.name);
      if (!writes) continue;
      before.emplace_back(p.tensor, p.tensor.detach());
      p.tensor.set_data(
          at::from_blob(const_cast<float*>(weight.data()), p.tensor.sizes(), at::kFloat).clone());
    }
  }
  std::string failure;
  if (writes) {
    try {
      torch::serialize::OutputArchive archive;
      model.save(archive);
      archive.save_to(path);
    } catch (const std::exception& error) {
      failure = error.what();
    }
    for (auto& [parameter, shell] : before) parameter.set_data(shell);
  }
  on_rank_0(engine.runtime(), path, failure);
}

}  // namespace tranche::libtorch::detail
