// The arithmetic of each optimizer for one vector. Included after storage.h.
//
// A rule is made of the constants of kernels.h, in the order given there. `gradient` scales the gradient and
// adds an L2 term; `update` changes the states and returns the new parameter.

struct GradientTerms {
    Vec::F grad_scale, l2;
    bool has_l2;
    explicit GradientTerms(const float* c)
        : grad_scale(Vec::set(c[0])), l2(Vec::set(c[1])), has_l2(c[1] != 0.0f) {}
    Vec::F gradient(Vec::F raw, Vec::F p) const {
        const Vec::F g = Vec::mulf(raw, grad_scale);
        return has_l2 ? Vec::fma(l2, p, g) : g;
    }
};

struct Adam : GradientTerms {
    static constexpr int kStates = 2;
    Vec::F decay, one_minus_beta1, one_minus_beta2, eps, neg_step, inv_sqrt_bc2;
    explicit Adam(const float* c)
        : GradientTerms(c),
          decay(Vec::set(c[2])),
          one_minus_beta1(Vec::set(c[3])),
          one_minus_beta2(Vec::set(c[4])),
          eps(Vec::set(c[5])),
          neg_step(Vec::set(c[6])),
          inv_sqrt_bc2(Vec::set(c[7])) {}
    Vec::F update(Vec::F p, Vec::F g, Vec::F (&s)[kStates]) const {
        s[0] = Vec::fma(one_minus_beta1, Vec::subf(g, s[0]), s[0]);
        s[1] = Vec::fma(one_minus_beta2, Vec::fms(g, g, s[1]), s[1]);
        const Vec::F denominator = Vec::fma(Vec::sqrtf(s[1]), inv_sqrt_bc2, eps);
        return Vec::fma(neg_step, Vec::divf(s[0], denominator), Vec::mulf(p, decay));
    }
};
