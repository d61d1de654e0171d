#pragma once
/// The meshes that a number of ranks allows.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::planner {

/// The sizes that a text such as "search, tensor=2" leaves to the search: nothing where the text does not
/// begin with the word "search", else the axes behind it ("tensor=2").
std::optional<std::string> searched_axes(std::string_view mesh);

/// Every mesh of so many ranks on the axes replicate, pipeline, shard, context and tensor, in that order,
/// slowest first, and with the sizes that `axes` gives; that of data ranks alone comes first. An axis of
/// `axes` with the size
/// `*` is searched. Throws ConfigurationError as Mesh::parse() does for the text, and for sizes that do
/// not divide the ranks, with the closest that do.
std::vector<std::string> all_meshes(int ranks, const std::string& axes = {});

}  // namespace tranche::planner
