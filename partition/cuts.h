#pragma once
/// Divides a model's units among the stages of a pipeline, from integers and counted operations only.

#include <functional>
#include <span>
#include <string_view>
#include <vector>

namespace tranche::detail {

/// Returns for each stage its first use of a unit, in forward order: stage s has uses [cuts[s], cuts[s + 1]),
/// and the last stage all from cuts.back() on. `work` is the operations of each use. The largest share of a
/// stage is as small as possible; among the cuts with this share, earlier stages take as many uses as fit.
/// Throws InvalidArgument when there are more stages than uses.
std::vector<int> balanced_cuts(std::span<const double> work, int stages);
/// The same with `share(begin, end)` as the work of uses [begin, end), if uses have work in common. It must
/// not decrease when a range grows.
std::vector<int> balanced_cuts(int uses, int stages, const std::function<double(int, int)>& share);
/// Equal numbers of uses for each stage; the first stages get one more if the number is not divisible.
std::vector<int> equal_cuts(int uses, int stages);
/// The cuts given by `begins`, the first use of each stage except the first. Throws InvalidArgument naming
/// the list and its first wrong number when its length is not stages - 1, it does not ascend, or it leaves a
/// stage without a use. `part` is the word for a stage in the error, because a model may also be cut into
/// chunks.
std::vector<int> listed_cuts(std::span<const int> begins, int uses, int stages,
                             std::string_view part = "stage");

}  // namespace tranche::detail
