/* tensor_role.c - what a tensor's role says about it */
#include "common/tensor_map.h"

bool tensor_is_projection(enum tensor_role role)
{
    switch (role) {
    case ROLE_KDA_Q: case ROLE_KDA_K: case ROLE_KDA_V: case ROLE_KDA_F_A: case ROLE_KDA_F_B:
    case ROLE_KDA_BETA: case ROLE_KDA_G: case ROLE_KDA_G_A: case ROLE_KDA_G_B: case ROLE_KDA_O:
    case ROLE_MLA_Q: case ROLE_MLA_Q_A: case ROLE_MLA_Q_B: case ROLE_MLA_KV_A: case ROLE_MLA_KV_B:
    case ROLE_MLA_G: case ROLE_MLA_O:
    case ROLE_MLP_GATE: case ROLE_MLP_UP: case ROLE_MLP_DOWN:
    case ROLE_LATENT_DOWN: case ROLE_LATENT_UP:
    case ROLE_SHARED_GATE: case ROLE_SHARED_UP: case ROLE_SHARED_DOWN:
    case ROLE_EXPERT_GATE: case ROLE_EXPERT_UP: case ROLE_EXPERT_DOWN:
        return true;
    default:
        return false;
    }
}
