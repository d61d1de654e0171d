#include "tranche/partition/mesh.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "core/closest_match.h"
#include "tranche/core/error.h"

namespace tranche {

namespace {

constexpr std::array<std::string_view, mesh_axes> names = {"replicate", "pipeline", "shard", "context",
                                                           "tensor"};
constexpr std::string_view example = "axes with sizes are expected, such as \"replicate=2, shard=*\"";

std::string_view trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

[[noreturn]] void refuse(std::string_view text, const std::string& reason) {
  throw ConfigurationError("mesh \"" + std::string(text) + "\": " + reason);
}

MeshAxis axis_of(std::string_view name, std::string_view text) {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found != names.end()) return static_cast<MeshAxis>(found - names.begin());
  const std::string closest = detail::closest_match(name, {names.begin(), names.end()});
  refuse(text, "there is no axis '" + std::string(name) + "'" +
                   (closest.empty() ? "; the axes are replicate, pipeline, shard, context, tensor"
                                    : "; the closest is " + closest));
}

using AxisSizes = std::vector<std::pair<MeshAxis, std::int64_t>>;  // size 0: `*`

/// The same axes with the closest sizes, by ratio, whose product divides the number of ranks, or equals it if
/// no axis has size `*`.
AxisSizes closest_axes(const AxisSizes& axes, int ranks) {
  const bool open = std::any_of(axes.begin(), axes.end(), [](const auto& axis) { return axis.second == 0; });
  AxisSizes best, tried = axes;
  std::vector<std::int64_t> divisors;
  for (std::int64_t size = 1; size <= ranks; ++size) {
    if (ranks % size == 0) divisors.push_back(size);
  }
  double least = std::numeric_limits<double>::infinity();
  const std::function<void(std::size_t, std::int64_t, double)> choose =
      [&](std::size_t next, std::int64_t left, double distance) {
        if (distance >= least) return;
        if (next == axes.size()) {
          if (left > 1 && !open) return;
          least = distance;
          best = tried;
          return;
        }
        if (axes[next].second == 0) return choose(next + 1, left, distance);
        const auto given = static_cast<double>(axes[next].second);
        for (const std::int64_t size : divisors) {
          if (left % size != 0) continue;
          tried[next].second = size;
          choose(next + 1, left / size, distance + std::abs(std::log(static_cast<double>(size) / given)));
        }
      };
  choose(0, ranks, 0);
  return best;
}

/// "; the closest mesh of 8 ranks is \"shard=4, tensor=2\"".
std::string closest_text(const AxisSizes& axes, int ranks) {
  std::string text;
  for (const auto& [axis, size] : closest_axes(axes, ranks)) {
    text += (text.empty() ? "" : ", ") + std::string(name_of(axis)) + "=" +
            (size == 0 ? std::string("*") : std::to_string(size));
  }
  return "; the closest mesh of " + std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks") + " is \"" +
         text + "\"";
}

/// "; add shard=* to take the rest: \"pipeline=2, shard=*, tensor=2\"" if these axes divide the ranks, and
/// their data ranks are only left out. Ranks of context and tensor, which send most, stay neighbours. Empty
/// otherwise.
std::string rest_text(const AxisSizes& axes, std::int64_t product, int ranks) {
  std::string text;
  bool added = false;
  for (const auto& [axis, size] : axes) {
    if (axis == MeshAxis::shard || ranks % product != 0) return {};
    if (!added && (axis == MeshAxis::context || axis == MeshAxis::tensor)) {
      text += "shard=*, ";
      added = true;
    }
    text += std::string(name_of(axis)) + "=" + std::to_string(size) + ", ";
  }
  if (!added) text += "shard=*, ";
  return "; add shard=* to take the rest: \"" + text.substr(0, text.size() - 2) + "\"";
}

}  // namespace

std::string_view name_of(MeshAxis axis) {
  return names[static_cast<std::size_t>(axis)];
}

Mesh::Mesh(int ranks) : ranks_(ranks) {
  if (ranks < 1) throw InvalidArgument("a mesh of " + std::to_string(ranks) + " ranks");
  sizes_[index(MeshAxis::shard)] = ranks;
  if (ranks > 1) order_ = {MeshAxis::shard};
}

Mesh Mesh::parse(std::string_view text, int ranks) {
  Mesh mesh(ranks);
  if (trimmed(text).empty()) return mesh;
  AxisSizes axes;
  for (std::size_t begin = 0, comma = 0; comma != std::string_view::npos; begin = comma + 1) {
    comma = text.find(',', begin);
    const std::string_view one =
        trimmed(text.substr(begin, comma == std::string_view::npos ? comma : comma - begin));
    if (one.empty()) refuse(text, "there is no axis on one side of a comma; " + std::string(example));
    const std::size_t equals = one.find('=');
    if (one == "search") refuse(text, "tranche plan --fit SIZE searches a mesh; name the axes that it finds");
    if (equals == std::string_view::npos)
      refuse(text, "'" + std::string(one) + "' has no size; " + std::string(example));
    const MeshAxis axis = axis_of(trimmed(one.substr(0, equals)), text);
    const std::string name(name_of(axis));
    const std::string_view size = trimmed(one.substr(equals + 1));
    if (std::any_of(axes.begin(), axes.end(), [&](const auto& before) { return before.first == axis; })) {
      refuse(text, "axis " + name + " is named twice");
    }
    std::int64_t number = 0;
    if (size == "*") {
      const auto other = std::find_if(axes.begin(), axes.end(), [](const auto& a) { return a.second == 0; });
      if (other != axes.end()) {
        refuse(text, "both " + std::string(name_of(other->first)) + " and " + name +
                         " are *; one axis at most can take what the others leave");
      }
    } else {
      const auto [end, error] = std::from_chars(size.data(), size.data() + size.size(), number);
      if (error != std::errc() || end != size.data() + size.size() || number < 1 || number > INT32_MAX) {
        refuse(text, "the size of " + name + " is '" + std::string(size) + "'; it has to be 1 or more, or *");
      }
    }
    axes.emplace_back(axis, number);
  }
  std::int64_t product = 1;
  std::string arithmetic;
  for (const auto& [axis, size] : axes) {
    if (size == 0) continue;
    arithmetic += (arithmetic.empty() ? "" : " x ") + std::string(name_of(axis)) + " " + std::to_string(size);
    product = product > ranks ? product : product * size;  // no overflow: larger is reported as too large
  }
  const std::string has = std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks");
  const auto open = std::find_if(axes.begin(), axes.end(), [](const auto& a) { return a.second == 0; });
  if (open != axes.end()) {
    if (ranks % product != 0) {
      refuse(text, arithmetic + " does not divide the " + has + ", so " + std::string(name_of(open->first)) +
                       " cannot take the rest" + closest_text(axes, ranks));
    }
    open->second = ranks / product;
  } else if (product != ranks) {
    const std::string rest = rest_text(axes, product, ranks);
    refuse(text, arithmetic +
                     (axes.size() > 1 ? " is " + (product > ranks ? "more than " + std::to_string(ranks)
                                                                  : std::to_string(product))
                                      : "") +
                     ", but there " + (ranks == 1 ? "is " : "are ") + has +
                     (rest.empty() ? "; give one axis the size * to take the rest" + closest_text(axes, ranks)
                                   : rest));
  }
  mesh.order_.clear();
  mesh.sizes_.fill(1);
  int stride = ranks;
  for (const auto& [axis, size] : axes) {
    if (size == 1) continue;
    stride /= static_cast<int>(size);
    mesh.sizes_[index(axis)] = static_cast<int>(size);
    mesh.strides_[index(axis)] = stride;
    mesh.order_.push_back(axis);
  }
  return mesh;
}

void Mesh::require_rank(int rank) const {
  if (rank < 0 || rank >= ranks_) {
    throw InvalidArgument("rank " + std::to_string(rank) + " of a mesh of " + std::to_string(ranks_));
  }
}

int Mesh::coordinate(MeshAxis axis, int rank) const {
  require_rank(rank);
  return rank / strides_[index(axis)] % sizes_[index(axis)];
}

std::vector<int> Mesh::group(std::initializer_list<MeshAxis> axes, int rank) const {
  require_rank(rank);
  std::vector<int> ranks;
  for (int other = 0; other < ranks_; ++other) {
    const bool together = std::all_of(order_.begin(), order_.end(), [&](MeshAxis axis) {
      return std::find(axes.begin(), axes.end(), axis) != axes.end() ||
             coordinate(axis, other) == coordinate(axis, rank);
    });
    if (together) ranks.push_back(other);
  }
  return ranks;
}

int Mesh::data_rank(int rank) const {
  const std::vector<int> ranks = group({MeshAxis::replicate, MeshAxis::shard}, rank);
  return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

int Mesh::token_rank(int rank) const {
  const std::vector<int> ranks = group({MeshAxis::replicate, MeshAxis::shard, MeshAxis::context}, rank);
  return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

int Mesh::state_rank(int rank) const {
  const int shard = coordinate(MeshAxis::shard, rank), context = coordinate(MeshAxis::context, rank);
  return strides_[index(MeshAxis::shard)] > strides_[index(MeshAxis::context)]
             ? shard * size(MeshAxis::context) + context
             : context * size(MeshAxis::shard) + shard;
}

std::string Mesh::to_string() const {
  std::string text;
  for (const MeshAxis axis : order_) {
    text += (text.empty() ? "" : ", ") + std::string(name_of(axis)) + "=" + std::to_string(size(axis));
  }
  return text.empty() ? "shard=1" : text;
}

std::string Mesh::describe(int rank) const {
  require_rank(rank);
  if (order_.size() < 2) return {};
  std::string text;
  for (const MeshAxis axis : order_) {
    text += (text.empty() ? "" : ", ") + std::string(name_of(axis)) + " " +
            std::to_string(coordinate(axis, rank));
  }
  return text;
}

std::string Mesh::name_of_rank(int rank) const {
  const std::string coordinates = describe(rank);
  return "rank " + std::to_string(rank) + (coordinates.empty() ? "" : " (" + coordinates + ")");
}

}  // namespace tranche
