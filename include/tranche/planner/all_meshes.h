#pragma once
/// The meshes that a number of ranks allows.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::planner {

/// The sizes that a text such as "search, tensor=2" fixes ("tensor=2"), while the search chooses the other
/// axes. Returns nothing if the text does not begin with the word "search".
std::optional<std::string> searched_axes(std::string_view mesh);

/// Every mesh of `ranks` ranks on the axes replicate, pipeline, shard, context and tensor, which are in this
/// order, slowest first. `axes` fixes the sizes of some axes; an axis with the size `*` is searched. The mesh
/// that has only data ranks is the first. Throws ConfigurationError as Mesh::parse() does for the text, and
/// for sizes that do not divide the ranks; the text then names the closest sizes that do.
std::vector<std::string> all_meshes(int ranks, const std::string& axes = {});

}  // namespace tranche::planner
