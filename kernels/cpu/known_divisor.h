#pragma once
/// Numbers for dividing by the same fp32 number again and again with multiplications only, correctly rounded.
///
/// With zh = RN(1 / y) and zl ~ 1 / y - zh, q = RN(x zh + RN(x zl)) differs from x / y by less than a unit in
/// the last place; then x - q y is an fp32 number, which a fused multiply-add delivers without rounding, and
/// RN(q + (x - q y) zh) is RN(x / y) (P. Markstein, IBM J. Res. Dev. 34, 1990; N. Brisebarre, J.-M. Muller
/// and S. Raina, IEEE Trans. Computers 53, 2004), as long as nothing leaves the range of normal numbers: the
/// caller keeps to the ranges below. Tests compare all 2^23 fractions of x with the division, for many y.

namespace tranche::kernels::cpu {

struct KnownDivisor {
  /// 1 / y in double, rounded to fp32, is RN(1 / y): 53 bits are more than twice 24 and two.
  explicit KnownDivisor(float y)
      : divisor(y),
        reciprocal_high(static_cast<float>(1.0 / double{y})),
        reciprocal_low(static_cast<float>(1.0 / double{y} - double{reciprocal_high})) {}
  float divisor, reciprocal_high, reciprocal_low;

  /// The divisors for which quotients of x in [2^-80, 2^80], +0, infinities and NaN are exact.
  static bool covers(float y) { return y >= 0x1p-20f && y <= 0x1p20f; }
};

}  // namespace tranche::kernels::cpu
