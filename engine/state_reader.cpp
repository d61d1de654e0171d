#include "engine/state_reader.h"

#include <algorithm>

#include "engine/sections.h"
#include "offload/aligned_buffer.h"

namespace tranche::detail {

namespace {

/// Asks for elements [first, ...) of a section of a flat buffer, to be read to `host`, which has the view's
/// elements; what no tensor covers is zeroed, what the match leaves out is not touched.
void request(const StateStore& store, const checkpoint::Reader& reader, const TensorMatch& match, const FlatBuffer& flat,
             const std::string& kind, std::int64_t first, const TensorView& host,
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
      requests.push_back(reader.request_for(source->name, kind,
                                            {piece.tensor_begin, piece.tensor_begin + piece.elements},
                                            host.dtype, bytes + offset(piece.buffer_begin),
                                            store.tensor_of(flat, piece).box));
    }
    pad_to(piece.buffer_begin);
    next = round_up(piece.buffer_begin + piece.elements, block_elements_of(host.dtype));
  }
  pad_to(range.end);
}

/// True when some elements in the range stay as they are.
bool keeps_some(const TensorMatch& match, const FlatBuffer& flat, const std::string& kind,
                const ElementRange& range) {
  const std::vector<TensorPiece> pieces = flat.layout.pieces(range);
  return std::any_of(pieces.begin(), pieces.end(),
                     [&](const TensorPiece& piece) { return match.source(flat, piece, kind) == nullptr; });
}

}  // namespace

void read_sections(StateStore& store, checkpoint::Reader& reader, const TensorMatch& match,
                   const std::vector<checkpoint::SectionRecord>& sections, Device& device,
                   MemoryResource& host_memory) {
  Stream& compute = device.compute_stream();
  const bool in_place = device.host_accessible();
  std::vector<checkpoint::ReadRequest> requests;
  const auto read_now = [&] {
    reader.read(requests);
    requests.clear();
  };
  for (UnitState& unit : store.units()) {
    for (const FlatBuffer& flat : unit.buffers) compute.wait(flat.gather_done);
    if (in_place) compute.synchronize();
    for (FlatBuffer& flat : unit.buffers) {
      const auto read = [&](const std::string& kind, std::int64_t first, const TensorView& to, bool on_host) {
        if (in_place || on_host) {
          request(store, reader, match, flat, kind, first, to, requests);
          return;
        }
        const AlignedBuffer staged(host_memory, to.bytes(), Category::other,
                                   unit.name + " " + kind + " from checkpoint");
        if (keeps_some(match, flat, kind, {first, first + to.elements()})) {
          store.read(staged.data(), to.data, to.bytes(), false);
        }
        request(store, reader, match, flat, kind, first, {staged.data(), to.dtype, to.shape}, requests);
        read_now();
        device.copy_from_host(compute, to.data, staged.data(), to.bytes());
        compute.synchronize();
      };
      // They are read by way of fp32, as they are stored.
      const auto read_halves = [&](const ShardSlice& slice) {
        const Shape shape{slice.range.size()};
        const AlignedBuffer staged(host_memory, shape.elements() * size_of(DataType::float32),
                                   Category::other, unit.name + " weight from checkpoint");
        auto* const values = static_cast<float*>(staged.data());
        if (keeps_some(match, flat, "weight", slice.range)) store.read_halves(slice, values);
        request(store, reader, match, flat, "weight", slice.range.begin, {values, DataType::float32, shape},
                requests);
        read_now();
        store.write_halves(slice, values);
      };
      if (flat.trainable && flat.empty()) continue;
      if (flat.trainable) {
        const Placement& placement = store.placement();
        const int of_class = placement.buffer(placement.buffer_of(flat.tensors.front())).state_class;
        store.visit(flat, store.residency().optimizer_range(flat), StateStore::Access::update,
                    [&](const ShardSlice& slice) {
                      for (const checkpoint::SectionRecord& section : sections) {
                        if (section.frozen || section.state_class != of_class) continue;
                        if (section.kind == "weight" && slice.in_halves()) {
                          read_halves(slice);
                          continue;
                        }
                        read(section.kind, slice.range.begin, section_of(slice, section, flat.states),
                             slice.on_host);
                      }
                      // A tile's memory is the next one's.
                      if (flat.optimizer_tier == OffloadTier::nvme) read_now();
                    });
        continue;
      }
      const ElementRange range = store.residency().parameters_range(flat);
      for (const checkpoint::SectionRecord& section : sections) {
        if (!section.frozen || range.empty()) continue;
        if (flat.parameters_tier != OffloadTier::nvme) {
          read(section.kind, range.begin, store.residency().parameters(flat, range),
               flat.parameters_tier == OffloadTier::cpu);
          continue;
        }
        const Shape shape{range.size()};
        const AlignedBuffer staged(host_memory, shape.elements() * size_of(section.dtype), Category::other,
                                   unit.name + " frozen from checkpoint");
        if (keeps_some(match, flat, section.kind, range)) {
          store.read_parameters(flat, range, staged.data());
        }
        request(store, reader, match, flat, section.kind, range.begin, {staged.data(), section.dtype, shape},
                requests);
        read_now();
        store.write_parameters(flat, range, staged.data());
      }
    }
  }
  reader.read(requests);
}

}  // namespace tranche::detail
