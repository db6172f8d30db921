/* ballast-worker - placeholder */
int main(void)
{
    return 0;
}
