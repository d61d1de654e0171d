#include "engine/state_reader.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "engine/sections.h"
#include "offload/aligned_buffer.h"

namespace tranche::detail {

namespace {

/// Adds requests that read elements [first, ...) of a flat buffer's section into `host`. Elements outside
/// tensors are zeroed, and elements of tensors that the match leaves out are not changed.
void request(const StateStore& store, const checkpoint::Reader& reader, const TensorMatch& match,
             const FlatBuffer& flat, const std::string& kind, std::int64_t first, const TensorView& host,
             std::vector<checkpoint::ReadRequest>& requests) {
  const auto offset = [&](std::int64_t element) { return bytes_of(host.dtype, element - first); };
  auto* bytes = static_cast<std::byte*>(host.data);
  const ElementRange range{first, first + host.elements()};
  std::int64_t next = first;
  const auto pad_to = [&](std::int64_t element) {
    std::memset(bytes + offset(next), 0, static_cast<std::size_t>(offset(element) - offset(next)));
  };
  for (const TensorPiece& piece : flat.layout.pieces(range)) {
    if (const checkpoint::StoredTensor* source = match.source(flat, piece, kind)) {
      requests.push_back(reader.request_for(
          source->name, kind, {piece.tensor_begin, piece.tensor_begin + piece.elements}, host.dtype,
          bytes + offset(piece.buffer_begin), store.tensor_of(flat, piece).box));
    }
    pad_to(piece.buffer_begin);
    next = round_up(piece.buffer_begin + piece.elements, block_elements_of(host.dtype));
  }
  pad_to(range.end);
}

/// True if some elements in the range are not read.
bool keeps_some(const TensorMatch& match, const FlatBuffer& flat, const std::string& kind,
                const ElementRange& range) {
  const std::vector<TensorPiece> pieces = flat.layout.pieces(range);
  return std::any_of(pieces.begin(), pieces.end(),
                     [&](const TensorPiece& piece) { return match.source(flat, piece, kind) == nullptr; });
}

class SectionReader {
 public:
  SectionReader(StateStore& store, checkpoint::Reader& reader, const TensorMatch& match,
                const std::vector<checkpoint::SectionRecord>& sections, Device& device,
                MemoryResource& host_memory)
      : store_(store),
        reader_(reader),
        match_(match),
        sections_(sections),
        device_(device),
        host_memory_(host_memory) {}

  void read_all() {
    Stream& compute = device_.compute_stream();
    for (UnitState& unit : store_.units()) {
      for (const FlatBuffer& flat : unit.buffers) compute.wait(flat.gather_done);
      if (device_.host_accessible()) compute.synchronize();
      unit_ = unit.name;
      for (FlatBuffer& flat : unit.buffers) {
        if (!flat.trainable) {
          read_frozen(flat);
        } else if (!flat.empty()) {
          read_trainable(flat);
        }
      }
    }
    read_now();
  }

 private:
  void read_now() {
    reader_.read(requests_);
    requests_.clear();
  }

  /// Reads elements of a section into host memory, from which `write` takes them. If some elements are not
  /// read, `keep` first fills the memory with their present values.
  void read_staged(const FlatBuffer& flat, const std::string& kind, const ElementRange& range, DataType dtype,
                   const char* what, const std::function<void(void*)>& keep,
                   const std::function<void(void*)>& write) {
    const Shape shape{range.size()};
    const AlignedBuffer staged(host_memory_, bytes_of(dtype, range.size()), Category::other,
                               unit_ + " " + what + " from checkpoint");
    if (keeps_some(match_, flat, kind, range)) keep(staged.data());
    request(store_, reader_, match_, flat, kind, range.begin, {staged.data(), dtype, shape}, requests_);
    read_now();
    write(staged.data());
  }

  void read(const FlatBuffer& flat, const std::string& kind, std::int64_t first, const TensorView& to,
            bool on_host) {
    if (device_.host_accessible() || on_host) {
      request(store_, reader_, match_, flat, kind, first, to, requests_);
      return;
    }
    read_staged(
        flat, kind, {first, first + to.elements()}, to.dtype, kind.c_str(),
        [&](void* staged) { store_.read(staged, to.data, to.bytes(), false); },
        [&](void* staged) {
          device_.copy_from_host(device_.compute_stream(), to.data, staged, to.bytes());
          device_.compute_stream().synchronize();
        });
  }

  void read_trainable(FlatBuffer& flat) {
    const Placement& placement = store_.placement();
    const int of_class = placement.buffer(placement.buffer_of(flat.tensors.front())).state_class;
    store_.visit(flat, store_.residency().optimizer_range(flat), StateStore::Access::update,
                 [&](const ShardSlice& slice) {
                   for (const checkpoint::SectionRecord& section : sections_) {
                     if (section.frozen || section.state_class != of_class) continue;
                     if (section.kind == "weight" && slice.in_halves()) {  // stored as fp32
                       read_staged(
                           flat, "weight", slice.range, DataType::float32, "weight",
                           [&](void* staged) { store_.read_halves(slice, static_cast<float*>(staged)); },
                           [&](void* staged) { store_.write_halves(slice, static_cast<float*>(staged)); });
                     } else {
                       read(flat, section.kind, slice.range.begin, section_of(slice, section, flat.states),
                            slice.on_host);
                     }
                   }
                   // The tile's memory is reused for the next tile.
                   if (flat.optimizer_tier == OffloadTier::nvme) read_now();
                 });
  }

  void read_frozen(FlatBuffer& flat) {
    const ElementRange range = store_.residency().parameters_range(flat);
    for (const checkpoint::SectionRecord& section : sections_) {
      if (!section.frozen || range.empty()) continue;
      if (flat.parameters_tier != OffloadTier::nvme) {
        read(flat, section.kind, range.begin, store_.residency().parameters(flat, range),
             flat.parameters_tier == OffloadTier::cpu);
        continue;
      }
      read_staged(
          flat, section.kind, range, section.dtype, "frozen",
          [&](void* staged) { store_.read_parameters(flat, range, staged); },
          [&](void* staged) { store_.write_parameters(flat, range, staged); });
    }
  }

  StateStore& store_;
  checkpoint::Reader& reader_;
  const TensorMatch& match_;
  const std::vector<checkpoint::SectionRecord>& sections_;
  Device& device_;
  MemoryResource& host_memory_;
  std::string unit_;  ///< the name of the unit being read, for errors
  std::vector<checkpoint::ReadRequest> requests_;
};

}  // namespace

void read_sections(StateStore& store, checkpoint::Reader& reader, const TensorMatch& match,
                   const std::vector<checkpoint::SectionRecord>& sections, Device& device,
                   MemoryResource& host_memory) {
  SectionReader(store, reader, match, sections, device, host_memory).read_all();
}

}  // namespace tranche::detail
