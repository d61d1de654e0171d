#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/convert.h"
#include "checkpoint/other_programs.h"
#include "checkpoint/safetensors.h"
#include "core/json_node.h"
#include "core/text_file.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {

using detail::join_path;

namespace {

constexpr std::int64_t largest_header = 100'000'000;
/// The largest size of a Git LFS pointer.
constexpr std::int64_t most_pointer = 1024;
/// The most files in a folder; the largest models have some hundred.
constexpr std::size_t most_files = 4096;

/// Bytes of an element; 0 for an unknown dtype.
std::int64_t element_bytes(std::string_view dtype) {
  struct Known {
    std::string_view name;
    std::int64_t bytes;
  };
  static constexpr std::array<Known, 16> known{{{"F64", 8},
                                                {"F32", 4},
                                                {"F16", 2},
                                                {"BF16", 2},
                                                {"I64", 8},
                                                {"I32", 4},
                                                {"I16", 2},
                                                {"I8", 1},
                                                {"U64", 8},
                                                {"U32", 4},
                                                {"U16", 2},
                                                {"U8", 1},
                                                {"F8_E4M3", 1},
                                                {"F8_E5M2", 1},
                                                {"BOOL", 1},
                                                {"C64", 8}}};
  for (const Known& entry : known) {
    if (entry.name == dtype) return entry.bytes;
  }
  return 0;
}

SafeTensor tensor_from(const std::string& name, const detail::JsonNode& node) {
  SafeTensor tensor;
  tensor.name = name;
  tensor.dtype = node["dtype"].text();
  const std::int64_t element = element_bytes(tensor.dtype);
  if (element == 0) node["dtype"].fail(fmt::format("is '{}', which is not known", tensor.dtype));
  tensor.shape = node["shape"].integers();
  for (const std::int64_t extent : tensor.shape) {
    if (extent < 0) node["shape"].fail("has a negative extent");
    try {
      tensor.elements = checked_multiply(tensor.elements, extent);
    } catch (const InvalidArgument&) {
      node["shape"].fail("has more elements than can be");
    }
  }
  const std::vector<std::int64_t> offsets = node["data_offsets"].integers();
  if (offsets.size() != 2 || offsets[0] < 0 || offsets[1] < offsets[0]) {
    node["data_offsets"].fail("are not a beginning and an end");
  }
  tensor.begin = offsets[0];
  tensor.end = offsets[1];
  if (tensor.elements > INT64_MAX / element || tensor.end - tensor.begin != tensor.elements * element) {
    node["data_offsets"].fail(fmt::format("hold {} bytes, but its shape holds {} elements of {}",
                                          tensor.end - tensor.begin, tensor.elements, tensor.dtype));
  }
  return tensor;
}

/// Checks that every byte of the data belongs to exactly one tensor.
void check_cover(std::vector<SafeTensor> tensors, std::int64_t bytes, const std::string& path) {
  std::sort(tensors.begin(), tensors.end(), [](const SafeTensor& a, const SafeTensor& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  std::int64_t at = 0;
  std::string before = "the header";
  for (const SafeTensor& tensor : tensors) {
    if (tensor.begin < at)
      throw CheckpointError(fmt::format("{}: tensors {} and {} overlap", path, before, tensor.name));
    if (tensor.begin > at) {
      throw CheckpointError(
          fmt::format("{}: bytes {} to {} of the data, between {} and {}, belong to no tensor", path, at,
                      tensor.begin - 1, before, tensor.name));
    }
    at = tensor.end;
    before = tensor.name;
  }
  if (at != bytes) {
    throw CheckpointError(fmt::format("{}: its tensors need {} bytes of data, the file holds {}: it is {}",
                                      path, at, bytes, at > bytes ? "truncated" : "too long"));
  }
}

}  // namespace

SafetensorsFolder::SafetensorsFolder(detail::FileSystem& files, std::string path)
    : files_(files), folder_(std::move(path)) {
  with_reason("cannot import " + folder_, [&] {
    const auto status = files_.status(folder_);
    if (!status) {
      throw CheckpointError("there is nothing of this name, and nothing is downloaded" +
                            advice_on_import(files_, folder_));
    }
    if (!status->is_directory) {
      const std::string file = folder_;
      folder_ = detail::parent_path(file);
      try {
        open_file(file, file);
      } catch (const CheckpointError&) {
        const std::string advice = advice_on_import(files_, file);
        if (advice.empty()) throw;
        throw CheckpointError("it is no safetensors file" + advice);
      }
      return;
    }
    const std::string index = join_path(folder_, "model.safetensors.index.json");
    const std::string single = join_path(folder_, "model.safetensors");
    if (files_.exists(single)) {
      open_file("model.safetensors", single);
    } else if (files_.exists(index)) {
      open_index(index);
    } else {
      throw CheckpointError("it holds neither model.safetensors nor model.safetensors.index.json" +
                            advice_on_import(files_, folder_));
    }
  });
}

void SafetensorsFolder::open_file(const std::string& name, const std::string& path) {
  auto file = files_.open(path, detail::OpenMode::read);
  const std::int64_t size = file->size();
  std::array<unsigned char, 8> raw{};
  if (size < 8)
    throw CheckpointError(fmt::format("{} has {} bytes: no safetensors file is so short", path, size));
  file->read(0, raw.data(), 8);
  if (size < most_pointer) {
    std::string text(static_cast<std::size_t>(size), '\0');
    file->read(0, text.data(), size);
    if (detail::is_lfs_pointer(text)) throw CheckpointError(fmt::format("{} {}", path, detail::lfs_advice));
  }
  std::uint64_t length = 0;
  for (std::size_t i = 8; i-- > 0;) length = length << 8 | raw[i];
  if (length > static_cast<std::uint64_t>(std::min(largest_header, size - 8))) {
    throw CheckpointError(
        fmt::format("{}: its header claims {} bytes; the file has {}, and headers end at {}: it is "
                    "truncated or no safetensors file",
                    path, length, size, largest_header));
  }
  std::string text(static_cast<std::size_t>(length), '\0');
  file->read(8, text.data(), static_cast<std::int64_t>(length));
  std::vector<SafeTensor> found;
  for (const auto& [key, node] :
       detail::JsonNode::read<CheckpointError>(text, path + " (header)").members()) {
    if (key != "__metadata__") {
      found.push_back(tensor_from(key, node));
    } else if (node.json().is_object()) {
      for (const auto& [entry, value] : node.json().items()) {
        if (value.is_string()) metadata_.emplace(entry, value.get<std::string>());
      }
    }
  }
  const std::int64_t data = 8 + static_cast<std::int64_t>(length);
  check_cover(found, size - data, path);
  for (SafeTensor& tensor : found) {
    tensor.file = paths_.size();
    tensor.begin += data;
    tensor.end += data;
    if (!names_.emplace(tensor.name, tensors_.size()).second) {
      throw CheckpointError(fmt::format("{}: tensor {} is in another file too", path, tensor.name));
    }
    tensors_.push_back(std::move(tensor));
  }
  paths_.push_back(name);
  open_.push_back(std::move(file));
}

void SafetensorsFolder::open_index(const std::string& path) {
  const auto entries =
      detail::JsonNode::read<CheckpointError>(files_.read_file(path), path)["weight_map"].members();
  std::set<std::string> names;
  for (const auto& [tensor, file] : entries) {
    const std::string name = file.text();
    if (name.empty() || name.find('/') != std::string::npos) file.fail("is not the name of a file beside it");
    names.insert(name);
    if (names.size() > most_files)
      file.fail(fmt::format("is one file too many: an index may name at most {} files", most_files));
  }
  for (const std::string& name : names) open_file(name, join_path(folder_, name));
  for (const auto& [tensor, file] : entries) {
    const SafeTensor* found = find(tensor);
    if (found == nullptr || paths_[found->file] != file.text()) {
      throw CheckpointError(fmt::format("{}: tensor {} is not in {}", path, tensor, file.text()));
    }
  }
}

const SafeTensor* SafetensorsFolder::find(std::string_view name) const {
  const auto found = names_.find(std::string(name));
  return found == names_.end() ? nullptr : &tensors_[found->second];
}

std::string SafetensorsFolder::metadata(const std::string& key) const {
  const auto found = metadata_.find(key);
  return found == metadata_.end() ? std::string() : found->second;
}

void SafetensorsFolder::read(const SafeTensor& tensor, detail::ElementRange elements, DataType dtype,
                             void* memory) const {
  DataType stored = DataType::float32;
  if (tensor.dtype == "BF16") {
    stored = DataType::bfloat16;
  } else if (tensor.dtype == "F16") {
    stored = DataType::float16;
  } else if (tensor.dtype != "F32") {
    throw CheckpointError(fmt::format("cannot import tensor {} of {}: it is {}; F32, BF16 and F16 are read",
                                      tensor.name, paths_[tensor.file], tensor.dtype));
  }
  if (elements.begin < 0 || elements.end < elements.begin || elements.end > tensor.elements) {
    throw InvalidArgument(fmt::format("elements {} to {} of tensor {}, which has {}", elements.begin,
                                      elements.end, tensor.name, tensor.elements));
  }
  with_reason("cannot import tensor " + tensor.name, [&] {
    constexpr std::int64_t most = std::int64_t{1} << 20;
    std::vector<std::byte> piece(static_cast<std::size_t>(std::min(most, elements.size()) * size_of(stored)));
    for (std::int64_t at = elements.begin; at < elements.end; at += most) {
      const std::int64_t count = std::min(most, elements.end - at);
      open_[tensor.file]->read(tensor.begin + at * size_of(stored), piece.data(), count * size_of(stored));
      convert(stored, piece.data(), dtype,
              static_cast<std::byte*>(memory) + (at - elements.begin) * size_of(dtype), count);
    }
  });
}

std::string SafetensorsFolder::config() const {
  const std::string path = join_path(folder_, "config.json");
  std::string text;
  with_reason("cannot import " + folder_, [&] {
    if (files_.exists(path)) text = files_.read_file(path);
  });
  return text;
}

}  // namespace tranche::checkpoint
